"""A run that leaves out its stragglers: what it counts, keeps, tells and gives to a replay."""

import logging
from pathlib import Path

import pytest

from adapters.calls import POLICY
from flows.replay import replay
from flows.train import train
from tasks.recording.journal import seal
from tasks.recording.scores import read_evaluation
from tasks.recording.step_log import read_metrics
from tasks.reports.verification import find_damage
from tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_run_counts_its_stragglers_and_cuts_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    quorum = {"groups": 4, "group_size": 4, "max_tokens": 16, "batches": 2, "quorum": 0.75}
    recipe = small_recipe(rollouts=quorum)
    with caplog.at_level(logging.WARNING):
        summary = train(recipe, run="run")
    assert "rollouts that end first: no other run repeats it" in caplog.text
    assert "in step 1 4 of 16 rollouts were left out" in caplog.text
    assert (summary.left_out, summary.failed, summary.reproducible) == (8, 0, False)
    run = RunFolder(tmp_path / "run")
    scores = read_evaluation(run.evaluation("00002"))
    assert {how: score.rollouts for how, score in scores.items()} == {"sampled": 4, "greedy": 4}
    assert [row["stragglers/count"] for row in read_metrics(run.metrics)] == [4, 4]
    assert [*find_damage(run)] == []

    for sealed in run.path.glob("spans/train-*.parquet"):
        sealed.rename(tmp_path / sealed.name)
        seal(run.journal(sealed.stem), sealed)
        assert sealed.read_bytes() == (tmp_path / sealed.name).read_bytes()
    replay(recipe, "run", run="again")
    again = RunFolder(tmp_path / "again")
    for step in range(2):
        assert again.datums(POLICY, step).read_bytes() == run.datums(POLICY, step).read_bytes()
    counts = [row["stragglers/count"] for row in read_metrics(again.metrics)]
    assert counts == [4, 4]
