"""dryrun: everything but the update, on this machine, and nothing is left."""

from pathlib import Path

import pyarrow as pa
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from typer.testing import CliRunner

from flows.cli.commands import app
from flows.recipe.dry_runs import OfflineError, shrink, take_offline
from tasks.reports.dryruns import TokenDrift, describe, read_drift
from tasks.storage.tables import write
from tests.support.small_recipe import small_recipe
from tests.tasks.test_reports import LONG, ended, rollout, said, sealed

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_dry_run_shows_what_is_recorded_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    said = CliRunner().invoke(app, ["dryrun", "hello", "--examples", "3"])
    assert said.exit_code == 0, said.output
    titles = [line for line in said.output.splitlines() if line.startswith("# ")]
    assert titles == ["# spans", "# drift", "# rewards", "# datums", "# transcript"]
    assert "train-00000-0002-01" in said.output
    assert "policy: no call had a history" in said.output
    assert "policy was asked: You are " in said.output
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
    assert "trajectories of the policy made " in datums
    assert "trajectories of the policy listener made " in datums


def test_a_long_error_and_a_tool_call_are_shown_whole(tmp_path: Path) -> None:
    example = {"attributes": {"example_id": 0, "example": {}}}
    calls = [{"function": {"name": "search", "arguments": '{"q": "x"}'}}]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    failed = [rollout(k, ended(None, LONG) | example) for k in (0, 1)]
    won = rollout(2, said("?", "", reply=reply), ended(1.0) | example)
    text = describe([sealed(tmp_path / "spans.parquet", *failed, won)], {}, {})
    assert f"train-00000-0000-00, train-00000-0000-01:\nTimeoutError: {LONG}\n" in text
    assert text.count(LONG) == 1
    assert 'policy answered: search({"q": "x"})' in text
    assert max(map(len, text.splitlines())) < 200, "a line of the table stays a line"


def test_a_shrunk_recipe_is_small_and_logs_nowhere() -> None:
    recipe = shrink(small_recipe(tracking={"project": "p"}, steps=9), 3)
    assert (recipe.steps, recipe.rollouts.groups, recipe.rollouts.group_size) == (1, 3, 2)
    assert recipe.tracking.project is None


def test_offline_takes_the_tiny_model_and_scripted_roles() -> None:
    hosted = small_recipe(model={"base": "Qwen/Qwen3-30B", "renderer": "qwen3_instruct"})
    model = take_offline(hosted).model
    assert (model.base, model.renderer) == ("local/tiny-chat", "qwen3")
    with pytest.raises(OfflineError, match="role answerer is answered by openai/gpt-5-mini"):
        take_offline(small_recipe(roles={"answerer": "openai/gpt-5-mini"}))
    several = small_recipe(roles={"teller": "policy", "listener": "policy:listener"})
    assert take_offline(several) == several


def test_drift_counts_the_turns_that_kept_their_tokens(tmp_path: Path) -> None:
    def trajectory(role: str, calls: int, begins: str, mask: list[int]) -> dict[str, object]:
        tokens = {"tokens": mask, "logprobs": [0.0] * len(mask), "mask": mask}
        return {"role": role, "calls": calls, "begins": begins, **tokens}

    made = [
        trajectory("policy", 3, "new", [0, 1]),  # two turns that kept
        trajectory("policy", 2, "unknown", [0, 1]),  # one that did not, and one that did
        trajectory("answerer", 9, "new", [0, 0]),
    ]
    path = write(pa.Table.from_pylist(made), tmp_path / "trajectories.parquet")
    assert read_drift(path) == [TokenDrift("policy", turns=4, kept=3, broken={"unknown": 1})]
    assert str(read_drift(path)[0]) == (
        "policy: 3 of 4 turns kept the tokens that were sampled (75%); broken: 1 by unknown"
    )
