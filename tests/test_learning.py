"""The picture of what runs have learnt."""

from pathlib import Path

import pytest

from benchmarks.learning import draw, learning
from tasks.checkpoints import Checkpoint, Ledger
from tasks.evaluations import Outcome, score, write_evaluation
from tasks.metrics import record_metrics
from tasks.storage.run_folder import opened_run

RECIPE = {"agent": "hello", "dataset": {"path": __file__}, "roles": {"judge": "openai/gpt-4o-mini"}}


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of two steps that was scored before them and after them."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    with opened_run("learnt", RECIPE, "f00d") as folder:
        ledger = Ledger(folder / "checkpoints.jsonl")
        for step in range(3):
            ledger.add(Checkpoint(step, f"tinker://sampler/{step}", f"tinker://state/{step}"))
        for step, reward in enumerate([0.25, 0.5]):
            seconds = {"seconds/sampling": 40.0, "seconds/training": 20.0}
            record_metrics(folder / "metrics.jsonl", step, {"reward/mean": reward, **seconds})
        for step, rewards in {0: [0.0, 0.0], 2: [0.0, 1.0]}.items():
            outcomes = [Outcome(f"group {reward}", reward) for reward in rewards]
            path = folder / "evaluations" / f"{ledger.at(step).version}.json"
            path.parent.mkdir(exist_ok=True)
            write_evaluation(path, {"sampled": score(outcomes)})
    return "learnt"


def test_minutes_are_those_of_sampling_and_training(learnt: str) -> None:
    run = learning(learnt)
    assert (run.agent, run.helpers) == ("hello", ("judge",))
    assert (run.minutes, run.rewards) == ([1.0, 2.0], [0.25, 0.5])
    assert {after: mean for after, (mean, _) in run.held_out.items()} == {0.0: 0.0, 2.0: 0.5}


def test_the_same_runs_are_the_same_picture(learnt: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for path in (one, other):
        draw([learning(learnt)], path)
    assert one.read_bytes() == other.read_bytes()
