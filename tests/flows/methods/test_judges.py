"""Judges: agents that score the rollouts of a step, whose scores are what is compared."""

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.forks import fork_run, replay_run
from ratchet.flows.checkpoints.policies import recorded_steps
from ratchet.flows.cli.recipes import shrink
from ratchet.flows.debug import debug_rollout
from ratchet.flows.dryrun import dryrun
from ratchet.flows.evaluate import evaluate
from ratchet.flows.opening.flow_runs import summarize_run
from ratchet.flows.recipe.loading import read_lineage
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.train import train
from ratchet.tasks.ends import StepStopped
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.judging import verdicts_of
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.spending.ledger import read_ledger
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch

PAIRS = {"agent": "judge:pairs"}
BEST = {"judge": "function:hello:compare"}
FIRST = {"judge": f"function:{__name__}:prefer_first"}


def prefer_first(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Prefer the first of two answers, whatever it is."""
    return "A"


def judged(judge: Any = PAIRS, **changes: Any) -> Recipe:
    return small_recipe(**{"judge": judge, "roles": BEST} | changes)


RECIPE = judged(steps=3, agent="tests.support.agents.unrewarded:play")
"""An agent that returns no reward, judged by comparisons of its rollouts."""

whole = fixture_of(RECIPE)


def scores_of(run: RunFolder, step: int) -> dict[str, float]:
    rows = read_table(run.verdicts(step)).to_pylist()
    return {row["rollout_id"]: row["verdict"] for row in rows}


def test_rewards_are_the_scores_of_the_judge(whole: RunFolder) -> None:
    for step in range(RECIPE.steps):
        scores = scores_of(whole, step)
        rewards = read_table(whole.rewards(POLICY, step)).to_pylist()
        assert len(rewards) == 16
        assert {row["rollout_id"]: row["reward"] for row in rewards} == scores
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rewards:
            groups[row["group_id"]].append(row["reward"])
        assert all(sum(group) == pytest.approx(0) for group in groups.values())


def test_a_judge_sees_what_was_said_and_no_reward(whole: RunFolder) -> None:
    rows = [row["example"] for row in read_shard(whole.shard("judge-00000"))]
    assert len(rows) == 4 * 6, "each pair of four rollouts"
    for row in rows:
        assert set(row) == {"rollouts", "example", "question", "criteria"}
        first, second = row["rollouts"]
        assert set(first) == {"id", "messages", "conversations"}
        assert first["messages"][0] == second["messages"][0]
        assert row["example"]["identity"] in first["messages"][0]["content"]
        assert first["messages"][-1]["role"] == "assistant"


def test_what_a_judge_did_is_measured(whole: RunFolder) -> None:
    rows = read_metrics(whole.metrics)
    for row in rows:
        assert (row["judge/calls"], row["judge/failed"]) == (48, 0)
        assert (row["judge/consistent"], row["judge/abstained"]) == (1, 0)
        assert (row["rollouts/ok"], row["rollouts/failed"]) == (16, 0)
        assert "reward/mean" not in row
        assert "judge/agreement" not in row, "nothing is known to agree with"
    assert any(row["groups/uniform_fraction"] < 1 for row in rows)


def spent(run: RunFolder) -> list[tuple[str, int]]:
    """List the calls of each role of a run in training that its ledger has."""
    calls = Counter[str]()
    for row in read_ledger(run).rows:
        if row.purpose in ("rollouts", "judge"):
            calls[row.role] += row.requests
    return sorted(calls.items())


def test_a_ledger_says_what_a_judge_took(whole: RunFolder) -> None:
    assert spent(whole) == [("judge", 3 * 48), ("policy", 3 * 16)]


@pytest.mark.parametrize(
    "place", ["judge-00001.0", pytest.param("train-00002.0", marks=pytest.mark.story)]
)
def test_a_run_that_dies_goes_on_and_judges_nothing_twice(
    whole: RunFolder, tmp_path: Path, place: str
) -> None:
    broken = die_and_go_on(RECIPE, dying_in_batch(place), tmp_path)
    assert differences(broken, whole) == []


@pytest.mark.parametrize("shard", ["train-00001", "judge-00001"])
def test_a_rollout_of_the_agent_or_of_the_judge_can_be_debugged(
    whole: RunFolder, shard: str
) -> None:
    rerun = debug_rollout(whole, f"{shard}-0002-00", sample=False, stop=False)
    assert rerun.answered == len(rerun.recorded.calls) > 0
    assert ("no reward" in rerun.recorded.end) == (shard == "train-00001")
    assert rerun.lines()["now"] == "the same"


def test_the_end_of_a_debugged_judge_is_its_verdict(whole: RunFolder) -> None:
    [row, *_] = read_shard(whole.shard("judge-00001"))
    rerun = debug_rollout(whole, "judge-00001-0000-00", sample=False, stop=False)
    scores = " -?[01], ".join(sorted(one["id"] for one in row["example"]["rollouts"]))
    verdict = rf"scores {scores} -?[01]; measured consistent 1, unread 0"
    assert re.fullmatch(verdict, rerun.lines()["was"])


def test_lost_verdicts_are_made_again(whole: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "lost")
    run = RunFolder(tmp_path / "lost")
    learnt = run.verdicts(1), run.rewards(POLICY, 1), run.datums(POLICY, 1)
    lost = [*learnt, run.spans("judge-00001.0")]
    kept = {path: path.read_bytes() for path in lost}
    for path in lost:
        path.unlink()

    recorded_steps(RECIPE, read_lineage(run, RECIPE), run, POLICY).source.restore(1)
    assert {path: path.read_bytes() for path in lost} == kept


@pytest.mark.story
def test_a_judge_that_prefers_the_first_of_two_teaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None, no_tinker: None
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    train(judged(steps=1, roles=FIRST), run="first")
    run = folder_of("first")
    [row] = read_metrics(run.metrics)
    assert set(scores_of(run, 0).values()) == {0.0}
    assert (row["judge/consistent"], row["groups/uniform_fraction"]) == (0, 1)
    assert row["judge/agreement"] == 0.5
    assert row["datums"] == 0


@pytest.mark.story
def test_a_fork_keeps_the_verdicts_and_a_replay_with_another_judge_asks_anew(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    fork = fork_run(whole, "fork", 2, RECIPE.model_dump(mode="json"), RECIPE.fingerprint())
    assert is_written(fork.verdicts(1))
    assert is_written(fork.spans("judge-00001.0"))
    assert not is_written(fork.shard("judge-00002"))
    other = judged(PAIRS | {"question": "Which is it?"}, steps=1, agent=RECIPE.agent)
    replay(other, "whole", run="again")
    again = folder_of("again")
    assert len(read_shard(again.shard("judge-00000"))) == 4 * 6
    assert read_table(again.datums(POLICY, 0)).num_rows > 0
    replay(RECIPE.model_copy(update={"steps": 1}), "whole", run="same")
    kept = folder_of("same")
    assert is_written(kept.spans("judge-00000.0"))
    asked = [read_metrics(run.metrics)[0]["judge/calls"] for run in (again, kept)]
    assert asked == [4 * 6 * 2, 0], "the parent has paid for its own verdicts"
    moved = RunFolder(again.path.rename(again.path.with_name("moved")))
    assert [spent(moved), spent(kept)] == [[("judge", 48)], []], "a new name changes no cost"


@pytest.mark.story
def test_a_replay_asks_another_model_behind_the_judge_anew(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    replay(judged(steps=1, agent=RECIPE.agent, roles=FIRST), "whole", run="first-again")
    again = folder_of("first-again")
    assert set(scores_of(again, 0).values()) == {0.0}
    assert set(scores_of(whole, 0).values()) != {0.0}
    ours, theirs = (one.spans("train-00000.0").stat().st_ino for one in (again, whole))
    assert ours == theirs, "what the agent has said is the same"
    assert is_written(again.evaluation("00000")), "and so is what no judge has scored"


def refuse_once(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Answer as a judge whose model is out of order while a file is there."""
    if Path("out_of_order").exists():
        raise RuntimeError("out of order")
    return "A"


@pytest.mark.story
def test_a_run_that_a_judge_has_stopped_asks_it_anew_when_it_is_continued(
    root: Path, prefect_server: None, no_tinker: None
) -> None:
    judge = PAIRS
    roles = {"judge": f"function:{__name__}:refuse_once"}
    recipe = judged(judge, roles=roles, steps=1, evaluation={"examples": 2, "greedy": False})
    flag = Path("out_of_order")
    flag.touch()
    try:
        with pytest.raises(StepStopped, match=r"judge-00000 failed, and 0 earned a reward"):
            train(recipe, run="stopped")
    finally:
        flag.unlink()
    run = folder_of("stopped")
    assert not is_written(run.verdicts(0))
    train(recipe, run="stopped")
    assert set(scores_of(run, 0).values()) == {0.0}
    assert [path.name for path in (run.path / "stopped").iterdir()] == ["judge-00000.0.0.jsonl"]


def test_a_dry_run_asks_the_judge(root: Path, prefect_server: None, no_tinker: None) -> None:
    report = dryrun(shrink(judged(agent=RECIPE.agent), 2), run="dryruns/judged").report
    assert is_written(folder_of("dryruns/judged").verdicts(0))
    assert "no rollout has a reward" not in report
    assert "datums" in report


EXAMINED = judged(
    steps=2,
    agent=RECIPE.agent,
    roles=FIRST | {"examiner": BEST["judge"]},
    evaluation={"examples": 4, "rollouts": 2, "judge": PAIRS | {"role": "examiner"}},
)
"""A training judge that teaches nothing, and another judge of the evaluations."""

examined = fixture_of(EXAMINED)


def test_evaluations_are_scored_by_a_judge_that_training_never_asks(examined: RunFolder) -> None:
    start, end = (read_evaluation(examined.evaluation(f"{step:05d}")) for step in (0, 2))
    assert start["judged"].finished.mean == 0, "checkpoint 0 beside itself"
    assert start["sampled"].finished.mean is None, "the agent gives no reward"
    assert not examined.shard("examiner-00000").exists()
    rows = [row["example"] for row in read_shard(examined.shard("examiner-00002"))]
    pairs = [sorted(one["id"] for one in row["rollouts"]) for row in rows]
    names = [f"-{example:04d}-{k:02d}" for example in range(4) for k in range(2)]
    assert sorted(pairs) == [[f"test-00000{name}", f"test-00002{name}"] for name in names]
    verdicts = verdicts_of(examined.sealed("examiner-00002"))
    own = [verdicts[f"test-00002{name}"] for name in names]
    assert end["judged"].finished.mean == pytest.approx(sum(own) / 8)
    assert end["judged"].spent["examiner"].calls == 16
    assert {name: end[name].spent for name in ("sampled", "greedy")} == {
        "sampled": {},
        "greedy": {},
    }
    assert summarize_run(examined).before == 0
    assert read_facts(examined).held_out.by_step[2] == end["judged"].finished.mean


@pytest.mark.story
def test_a_replay_asks_another_model_behind_the_judge_of_evaluations_anew(
    examined: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(examined.path.parent))

    def replayed(name: str, roles: Mapping[str, object]) -> RunFolder:
        values = EXAMINED.model_copy(update={"roles": roles}).model_dump(mode="json")
        return replay_run(examined, name, values, "0" * 64)

    same = replayed("same-examiner", EXAMINED.roles)
    other = replayed("other-examiner", EXAMINED.roles | {"examiner": FIRST["judge"]})
    assert [is_written(one.evaluation("00000")) for one in (same, other)] == [True, False]
    assert is_written(other.spans("judge-00000.0")), "the judge of training is the same"
    with pytest.raises(RunError, match=r"roles.other: null → 'a/b': nothing is sampled"):
        replayed("other-role", EXAMINED.roles | {"other": "a/b"})


@pytest.mark.story
@pytest.mark.parametrize("place", ["test-00002.0", "examiner-00002.0"])
def test_an_evaluation_that_dies_goes_on_and_is_judged_once(
    examined: RunFolder, tmp_path: Path, place: str
) -> None:
    broken = die_and_go_on(EXAMINED, dying_in_batch(place), tmp_path)
    assert differences(broken, examined) == []


@pytest.mark.story
def test_a_judge_is_asked_of_a_checkpoint_that_was_trained_without_it(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    alone = {"agent": f"{__name__}:words", "sees": "rollout", "role": "examiner"}
    evaluation = {"examples": 3, "greedy": False, "judge": alone}
    recipe = judged(agent=RECIPE.agent, evaluation=evaluation)
    scores = evaluate(recipe, run="whole", checkpoint=3).scores
    assert scores["judged"].rollouts == 3
    assert scores["judged"].finished.mean == pytest.approx(0.25)
    again = evaluate(recipe, run="whole", checkpoint=3)
    assert again.scores == scores
    assert again.outcome == "held-out reward unknown sampled, 0.25 judged"


@pytest.mark.story
def test_a_judge_of_evaluations_that_fails_stops_the_run_and_is_asked_anew(
    root: Path, prefect_server: None, no_tinker: None
) -> None:
    roles = BEST | {"examiner": f"function:{__name__}:refuse_once"}
    second = PAIRS | {"role": "examiner"}
    evaluation = {"examples": 2, "greedy": False, "judge": second}
    recipe = judged(roles=roles, steps=1, agent=RECIPE.agent, evaluation=evaluation)
    flag = Path("out_of_order")
    flag.touch()
    try:
        with pytest.raises(StepStopped, match=r"2 of the 2 rollouts of examiner-00001 failed"):
            train(recipe, run="unexamined")
    finally:
        flag.unlink()
    run = folder_of("unexamined")
    assert not is_written(run.evaluation("00001"))
    train(recipe, run="unexamined")
    assert read_evaluation(run.evaluation("00001"))["judged"].finished.mean == 0


async def abstain(example: dict[str, Any], **endpoint: str) -> dict[str, float]:
    """Say of no rollout how good it is."""
    return {}


@pytest.mark.story
def test_an_evaluation_of_which_the_judge_scores_nothing_is_no_result(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    alone = {"agent": f"{__name__}:abstain", "sees": "rollout", "role": "examiner"}
    evaluation = {"examples": 2, "greedy": False, "judge": alone}
    recipe = judged(agent=RECIPE.agent, evaluation=evaluation)
    before = whole.evaluations()
    for _ in range(2):
        with pytest.raises(StepStopped, match="the judge has given none of the rollouts of"):
            evaluate(recipe, run="whole", checkpoint=2)
    assert whole.evaluations() == before


@pytest.mark.story
def test_a_judge_that_scores_no_rollout_abstains_and_the_run_says_that_it_trained_nothing(
    root: Path, prefect_server: None, no_tinker: None, caplog: pytest.LogCaptureFixture
) -> None:
    judge = {"agent": f"{__name__}:abstain", "sees": "group"}
    train(judged(judge, steps=1, evaluation={"examples": 1, "greedy": False}), run="abstains")
    run = folder_of("abstains")
    assert set(scores_of(run, 0).values()) == {None}
    (row,) = read_metrics(run.metrics)
    assert (row["judge/abstained"], row["judge/failed"], row["datums"]) == (1, 0, 0)
    assert "step 0 was not trained: the judge has given no rollout a score" in caplog.text
    remedy = re.search(r'ratchet sql --run abstains "(.*)"', caplog.text)
    assert remedy is not None
    with open_views([run]) as views:
        assert views.sql(remedy[1]).columns == ["step", "said"]


async def words(example: dict[str, Any], **endpoint: str) -> dict[str, float]:
    """Score each rollout a quarter."""
    return {one["id"]: 0.25 for one in example["rollouts"]}


def test_a_judge_that_does_not_exist_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None, no_tinker: None
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    with pytest.raises(UserError, match="there is no judge 'best'; there is: pairs, group, crit"):
        train(judged({"agent": "judge:best"}), run="none")
    assert not folder_of("none").path.exists()
