"""An expert's texts beside rollouts: their share of a step's loss, what is refused, and kills."""

import shutil
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.adapters.calls import POLICY
from ratchet.adapters.tinker.live_policy import Pass
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.checkpoints.policies import recorded_steps
from ratchet.flows.recipe.loading import read_lineage
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.train import train
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.settings.algorithm import Algorithm
from ratchet.tasks.settings.given import Expert
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from tests.support.runs.finetuned import EXPERT
from tests.support.runs.finetuned import WITH_EXPERT as RECIPE
from tests.support.runs.killed import train_until_killed
from tests.support.runs.small_recipe import small_recipe


@pytest.fixture(scope="module")
def whole(root: Path, prefect_server: None, no_tinker: None) -> RunFolder:
    train(RECIPE, run="whole")
    return folder_of("whole")


def changed(**expert: Any) -> Recipe:
    algorithm = RECIPE.algorithm.model_dump() | {"expert": {**EXPERT, **expert}}
    return RECIPE.model_copy(update={"algorithm": Algorithm.model_validate(algorithm)})


def passes(run: RunFolder, step: int) -> list[Pass]:
    steps = recorded_steps(RECIPE, read_lineage(run, RECIPE), run, POLICY)
    return steps.restored(step).request.passes


def sent(asked: Pass, name: str) -> list[np.ndarray]:
    return [datum.loss_fn_inputs[name].to_numpy() for datum in asked.datums]


@pytest.mark.parametrize("step", range(5))
def test_the_share_rises_to_the_peak_and_falls_by_a_cosine_to_the_valley(step: int) -> None:
    expert = Expert(path="a", share=0.9, final_share=0.1, warmup_steps=2, decay_steps=2)
    expected = [0.0, 0.45, 0.9, 0.1 + 0.8 * (1 + cos(pi / 2)) / 2, 0.1]
    assert expert.share_at(step) == pytest.approx(expected[step], abs=1e-12)
    assert Expert(path="a", share=0.3).share_at(step) == 0.3


def test_both_sources_are_counted_and_their_shares_are_those_of_the_schedule(
    whole: RunFolder,
) -> None:
    rows = read_metrics(whole.metrics)
    assert [row["expert/share"] for row in rows] == pytest.approx([0.5, 0.4, 0.2, 0.1])
    for row in rows:
        assert (row["expert/texts"], row["expert/ends"], row["expert/cut"]) == (6, 1.0, 0)
        assert row["expert/tokens"] > 0
        assert row["expert/loss"] > 0
        assert "loss" not in row
    assert [*find_damage(whole)] == []


def test_each_source_is_divided_by_its_own_denominator(whole: RunFolder) -> None:
    """The weights of all tokens of the texts sum to µ, and those of rollouts to 1 - µ."""
    rows = read_metrics(whole.metrics)
    for step in (0, 2):
        rollouts, texts = passes(whole, step)
        share = rows[step]["expert/share"]
        weights = np.concatenate(sent(texts, "weights"))
        assert weights.sum() == pytest.approx(share, abs=1e-6)
        assert (weights > 0).sum() == rows[step]["expert/tokens"]
        (alone,) = passes_alone(whole, step)
        for mixed, plain in zip(
            sent(rollouts, "advantages"), sent(alone, "advantages"), strict=True
        ):
            assert mixed == pytest.approx(plain * (1 - share), abs=1e-6)


def passes_alone(run: RunFolder, step: int) -> list[Pass]:
    """Return the passes of the same rollouts by the recipe without an expert."""
    alone = small_recipe(steps=4, algorithm={"advantage": "centred", "aggregation": "token_mean"})
    steps = recorded_steps(alone, read_lineage(run, alone), run, POLICY)
    return steps.read(step, [run.datums(POLICY, step)]).request.passes


def test_a_minibatch_has_its_part_of_both_sources() -> None:
    method = small_recipe(
        algorithm={"expert": EXPERT}, optimizer={"substeps": 2, "learning_rate": 0.1}
    ).update_method()
    units: Any = [[[number] for number in range(4)], [[number] for number in range(10, 17)]]
    steps = method.request(0, units).optimizer_steps
    made = [[(one.term, [*one.datums]) for one in step] for step in steps]
    assert made == [[(0, [0, 1]), (1, [10, 11, 12])], [(0, [2, 3]), (1, [13, 14, 15, 16])]]
    nothing_played = method.request(0, [[], units[1]]).optimizer_steps
    assert [[one.term for one in step] for step in nothing_played] == [[1], [1]]


@pytest.mark.story
@pytest.mark.parametrize("phase", ["begin", "add"])
def test_a_killed_run_ends_with_the_same_bits(whole: RunFolder, phase: str) -> None:
    name = f"killed-{phase}"
    train_until_killed("finetuned", name, phase, "expert")
    train(RECIPE, run=name)
    assert list_faults(folder_of(name), read_contents(whole)) == []


def test_lost_datums_of_both_sources_are_made_again(whole: RunFolder) -> None:
    shutil.copytree(whole.path, folder_of("lost").path)
    run = folder_of("lost")
    paths = [*run.learned(POLICY, "expert"), *run.learned(POLICY, "datums")]
    kept = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.unlink()
    for step in range(RECIPE.steps):
        passes(run, step)
    assert {path: path.read_bytes() for path in paths} == kept


@pytest.mark.story
def test_a_fork_keeps_the_texts_and_may_change_their_share(whole: RunFolder) -> None:
    recipe = changed(share=0.9)
    fork_run(whole, "fork", 2, recipe.model_dump(mode="json"), recipe.fingerprint())
    train(recipe, run="fork")
    own, parent = (read_metrics(run.metrics) for run in (folder_of("fork"), whole))
    assert own[:2] == parent[:2]
    assert own[2]["expert/share"] == pytest.approx(0.3)
    other = changed(trained="all")
    with pytest.raises(RunError, match="the texts are the parent's; train a new run instead"):
        fork_run(whole, "other", 2, other.model_dump(mode="json"), other.fingerprint())


@pytest.mark.story
def test_recorded_rollouts_are_trained_with_texts_that_another_run_has_sampled(
    whole: RunFolder,
) -> None:
    query = "select run, rollout_id from rollouts where reward = 1 and batch like 'train-%'"
    expert = {"runs": ["whole"], "query": query, "examples": 2}
    algorithm = {"advantage": "centred", "expert": expert}
    recipe = small_recipe(steps=4, algorithm=algorithm)
    replay(recipe, "whole", run="replayed")
    rows = read_metrics(folder_of("replayed").metrics)
    assert [row["expert/texts"] for row in rows] == [2] * 4
    assert [row["calls"] for row in rows] == [0] * 4


def test_an_expert_without_a_trained_token_is_refused_and_leaves_no_run(
    root: Path, prefect_server: None, no_tinker: None, tmp_path: Path
) -> None:
    empty = tmp_path / "texts.jsonl"
    row = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    empty.write_text(row + ', "split": "test"}\n')
    with pytest.raises(DatasetError, match="train"):
        train(changed(path=str(empty)), run="empty")
    unmarked = tmp_path / "unmarked.jsonl"
    unmarked.write_text(row + ', "split": "train"}\n')
    with pytest.raises(DatasetError, match="nothing is trained in the split 'train'"):
        train(changed(path=str(unmarked), trained="marked"), run="empty")
    assert not folder_of("empty").exists()
