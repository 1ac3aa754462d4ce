"""GSM8K as its user runs it: our own problems, two steps on the tiny base."""

from pathlib import Path

import pytest

from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.run_folder import folder_of
from tests.support.runs.small_recipe import small_recipe

pytest.importorskip("math_verify", reason="math-verify is not installed: make setup")

PROBLEMS = Path(__file__).parents[2] / "datasets" / "gsm8k"


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_word_problems_of_a_folder_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    recipe = small_recipe(
        agent="gsm8k",
        dataset={"path": str(PROBLEMS), "columns": ["question", "answer"]},
        rollouts={"groups": 4, "group_size": 4, "max_tokens": 24, "lag": 1},
    )
    outcome = train(recipe, run="problems")
    run = folder_of("problems")
    rows = read_metrics(run.metrics)
    assert (outcome.steps, outcome.failed) == (2, 0)
    assert [(row["rollouts/ok"], row["calls"]) for row in rows] == [(16, 16), (16, 16)]
    assert all(0.0 <= row["reward/mean"] <= 1.0 for row in rows)
    assert None not in (outcome.before, outcome.after)
    assert [len(sum) for sum in read_manifest(run)["files"].values()] == [64, 64]
