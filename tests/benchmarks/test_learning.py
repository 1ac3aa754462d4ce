"""The picture of what runs have learnt."""

from pathlib import Path

import pytest

from benchmarks.pictures.learning import read_curve
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.scores import SCORES
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.manifest import bind_run
from ratchet.tasks.storage.run_folder import RunFolder

RECIPE = {"agent": "hello", "dataset": {"path": __file__}, "roles": {"judge": "openai/gpt-4o-mini"}}


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of two steps that was evaluated before the first and after the last."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    with bind_run("learnt", RECIPE, "f00d") as run:
        for step, reward in enumerate([0.25, 0.5]):
            seconds = {"seconds/sampling": 40.0, "seconds/training": 20.0}
            record_metrics(run.metrics, step, {"reward/mean": reward, **seconds})
        for step, rewards in {0: [0.0, 0.0], 2: [0.0, 1.0]}.items():
            scores = score_outcomes(
                [ScoredRollout(f"group {at}", won) for at, won in enumerate(rewards)]
            )
            scored = SCORES.dump_python({"sampled": scores}, mode="json")
            write_json(run.evaluation(f"{step:05d}"), scored)
    return run


def test_curve_counts_minutes_of_sampling_and_training(learnt: RunFolder) -> None:
    curve = read_curve(learnt)
    assert (curve.agent, curve.helpers) == ("hello", ("judge",))
    assert (curve.minutes, curve.rewards) == ([1.0, 2.0], [0.25, 0.5])
    assert {after: mean for after, (mean, _) in curve.held_out.items()} == {0.0: 0.0, 2.0: 0.5}
