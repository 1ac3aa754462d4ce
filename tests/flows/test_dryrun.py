"""dryrun: everything but the update, on this machine, and nothing is left."""

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from typer.testing import CliRunner

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import hanging
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.recipes import take_offline
from ratchet.tasks.datums import build_datums
from ratchet.tasks.recording.transcripts import read_transcripts
from ratchet.tasks.reports.dryruns import (
    KeptTokens,
    LearnedFrom,
    Played,
    describe_dryrun,
    find_fault,
    read_kept_tokens,
)
from ratchet.tasks.rewards import compute_rewards
from ratchet.tasks.settings.algorithm import CreditAssignment
from ratchet.tasks.storage.tables import write_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited
from tests.support.runs.small_recipe import small_recipe
from tests.tasks.test_reports import LONG, ended, rollout, said, sealed

ROOT = Path(__file__).parents[2]
CENTRED = credited("centred", min_group_size=2)
EXAMPLE = {"attributes": {"example_id": 0, "example": {}}}
CALL = said("?", "yes")
PLAYED = Played("local/tiny-chat")


def test_a_dry_run_asks_no_teacher_of_another_service() -> None:
    teacher = {"models": ["https://there.example#some/model"]}
    with pytest.raises(UserError, match=r"there\.example#some/model.*allow it by --online"):
        take_offline(small_recipe(algorithm={"teacher": teacher}))


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_dry_run_shows_what_is_recorded_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    said = CliRunner().invoke(app, ["dryrun", "hello", "--examples", "3"])
    assert said.exit_code == 0, said.output
    titles = [line for line in said.output.splitlines() if line.startswith("# ")]
    assert titles == [
        "# program",
        "# spans",
        "# kept tokens",
        "# rewards",
        "# datums",
        "# transcript",
        "# whole recipe",
    ]
    assert "train-00000-0002-01" in said.output
    assert "policy: no call had a history" in said.output
    assert "policy was asked: You are " in said.output
    assert said.output.count("The tiny base model has played: its words check that ") == 1
    assert list((tmp_path / "dryruns").iterdir()) == []
    tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=["dryrun"]))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=tagged)
    assert any(run.name.startswith("dryruns/hello-") for run in runs)


@pytest.mark.usefixtures("prefect_server", "tiny_chat")
def test_a_dry_run_of_several_policies_shows_what_each_would_learn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    apart = ["--set", "roles.listener=policy:listener"]
    said = CliRunner().invoke(app, ["dryrun", "whispers", "--examples", "2", *apart])
    assert said.exit_code == 0, said.output
    _, _, datums = said.output.partition("# datums")
    policy, listener, *_ = datums.strip().splitlines()
    assert re.search(r"the policy (made|would)", policy)
    assert re.search(r"the policy listener (made|would)", listener)


def test_a_long_error_and_a_tool_call_are_shown_whole(tmp_path: Path) -> None:
    example = {"attributes": {"example_id": 0, "example": {}}}
    calls = [{"function": {"name": "search", "arguments": '{"q": "x"}'}}]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    failed = [rollout(k, ended(None, LONG) | example) for k in (0, 1)]
    won = rollout(2, said("?", "", reply=reply), ended(1.0) | example)
    text = describe_dryrun([sealed(tmp_path / "spans.parquet", *failed, won)], {}, CENTRED, PLAYED)
    shown = hanging(f"train-00000-0000-00, train-00000-0000-01:\nTimeoutError: {LONG}")
    assert text.count(shown) == text.count(LONG.splitlines()[-1]) == 1
    assert 'policy answered: search({"q": "x"})' in text
    table = text.partition("# spans\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 5
    assert max(map(len, table)) <= 100


def test_a_dry_run_says_which_errors_are_rewards_and_what_an_agent_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    limit = {"error_type": "MaxTurnsExceeded", "error_message": "Max turns (3) exceeded"}
    own = ended(0.5) | {"kind": "credit", "role": "measure/is short", "reward_name": "role"}
    last = rollout(1, CALL, own, ended(-1.0) | EXAMPLE)
    rollouts = [rollout(0, ended(0.0) | EXAMPLE | limit), last]
    text = describe_dryrun([sealed(tmp_path / "s.parquet", *rollouts)], {}, CENTRED, PLAYED)
    assert "ended: 1 by MaxTurnsExceeded, with its reward (rollouts.rewarded_errors)" in text
    assert "train-00000-0000-00, reward 0, for MaxTurnsExceeded" in text
    assert re.search(
        r"^train-00000-0000-00 +reward .* reward 0.0, for MaxTurnsExceeded$", text, re.M
    )
    assert re.search(r"^train-00000-0000-01 +measure +is short .* 0.5$", text, re.M)


def learn(folder: Path, credit: CreditAssignment, *rollouts: list) -> str:
    """Return the part of a dry run's report about its datums, up to the transcript."""
    spans = sealed(folder / "spans.parquet", *rollouts)
    of = LearnedFrom(
        *(folder / f"{name}.parquet" for name in ("trajectories", "rewards", "datums"))
    )
    assemble_trajectories.make(of.trajectories, [spans])
    compute_rewards.make(of.rewards, of.trajectories, credit.algorithm.rewards)
    build_datums.make(of.datums, of.trajectories, of.rewards, credit)
    report = describe_dryrun([spans], {"policy": of}, credit, PLAYED)
    fault = find_fault(of, credit, read_transcripts([spans]))
    said = report.partition("# datums\n\n")[2].partition("\n\n#")[0]
    assert bool(fault) != said.endswith(("are equal", "is zero", "be trained"))
    return said


@pytest.mark.parametrize(
    ("rewards", "call", "credit", "why"),
    [
        ((1.0, 1.0), CALL, {}, "in each group all rewards are equal"),
        ((None, None), CALL, {}, "all 2 rollouts failed"),
        ((1.0, None), CALL, {}, "no group has 2 rollouts with a reward"),
        (
            (1.0, 0.0),
            CALL | {"role": "judge"},
            {},
            "no rollout with a reward has a call that the policy answered; the agent must ask the "
            "base_url that it is given",
        ),
        (
            (1.0, 0.0),
            CALL,
            {"rewards": "select rollout_id, role, reward from rewards where reward > 9"},
            "algorithm.rewards left all out",
        ),
        ((0.0, 0.0), CALL, {"advantage": "none"}, "every advantage (r) is zero"),
    ],
)
def test_a_dry_run_without_datums_says_why(
    tmp_path: Path, rewards: tuple, call: dict, credit: dict, why: str
) -> None:
    rollouts = [rollout(k, call, ended(r) | EXAMPLE) for k, r in enumerate(rewards)]
    credit = {"advantage": "centred", "min_group_size": 2} | credit
    said = learn(tmp_path, credited(**credit), *rollouts)
    assert said == f"the policy would learn nothing: {why}"


def test_a_role_that_the_agent_does_not_reward_has_no_datums(tmp_path: Path) -> None:
    judged = {"kind": "credit", "role": "judge", "reward": 1.0}
    rollouts = [rollout(k, CALL, judged, ended(1.0) | EXAMPLE) for k in (0, 1)]
    said = learn(tmp_path, CENTRED, *rollouts)
    assert said == "the policy would learn nothing: the agent rewards other roles"


def test_a_dry_run_with_datums_counts_them(tmp_path: Path) -> None:
    rollouts = [rollout(k, CALL, ended(float(k)) | EXAMPLE) for k in (0, 1)]
    assert learn(tmp_path, CENTRED, *rollouts) == (
        "2 trajectories of the policy made 2 datums, in which 2 tokens would be trained"
    )


FAILING = """
async def play(example: dict, *, base_url: str, model: str, api_key: str) -> float:
    return example["no such column"]
"""


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_kept_dry_run_ends_with_the_query_that_lists_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "failing.py").write_text(FAILING)
    for name in ("datasets", "prefect.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    failing = ["hello", "--set", "agent=failing", "--examples", "2"]
    dry = CliRunner().invoke(app, ["dryrun", *failing, "--keep"])
    assert "the policy would learn nothing: all 4 rollouts failed" in dry.output
    (command,) = re.findall(r"ratchet (sql .*)", dry.output)
    told = CliRunner().invoke(app, ["dryrun", *failing, "--json"])
    record = json.loads(told.stdout)
    assert (told.exit_code, record["failed"], record["rewards"]) == (1, 4, {})
    assert [error.partition(":")[0] for error in record["errors"].values()] == ["KeyError"] * 4
    asked = CliRunner().invoke(app, [*shlex.split(command), "--format", "json"])
    rows = json.loads(asked.stdout)
    assert [row["rollout_id"] for row in rows] == [
        f"train-00000-{example:04d}-{k:02d}" for example in (0, 1) for k in (0, 1)
    ]
    for row in rows:
        assert [*row] == ["run", "rollout_id", "error_type", "error_message"]
        assert row["error_type"] == "KeyError"
        assert re.fullmatch(r"'no such column' at .*failing\.py:3", row["error_message"])


def test_offline_takes_the_tiny_model_and_scripted_roles() -> None:
    hosted = small_recipe(model={"base": "Qwen/Qwen3-30B", "renderer": "qwen3_instruct"})
    model = take_offline(hosted).model
    assert (model.base, model.renderer) == ("local/tiny-chat", "auto")
    with pytest.raises(UserError, match="role answerer is answered by openai/gpt-5-mini"):
        take_offline(small_recipe(roles={"answerer": "openai/gpt-5-mini"}))
    several = small_recipe(roles={"teller": "policy", "listener": "policy:listener"})
    assert take_offline(several) == several


def test_the_turns_that_kept_their_tokens_are_counted(tmp_path: Path) -> None:
    def trajectory(role: str, calls: int, begins: str, mask: list[int]) -> dict[str, object]:
        tokens = {"tokens": mask, "logprobs": [0.0] * len(mask), "mask": mask}
        return {"role": role, "calls": calls, "begins": begins, **tokens}

    made = [
        trajectory("policy", 3, "new", [0, 1]),  # two turns that kept
        trajectory("policy", 2, "unknown", [0, 1]),  # one that did not, and one that did
        trajectory("answerer", 9, "new", [0, 0]),
    ]
    path = write_table(pa.Table.from_pylist(made), tmp_path / "trajectories.parquet")
    (kept,) = read_kept_tokens(path)
    assert kept == KeptTokens("policy", turns=4, kept=3, not_kept={"unknown": 1})
    assert str(kept) == (
        "policy: 3 of 4 turns kept the tokens that were sampled (75%); not kept: 1 by unknown"
    )
