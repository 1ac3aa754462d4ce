"""Evaluation of a checkpoint: held-out examples are played, sampled and greedily, and scored."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from adapters.calls import Sampling
from flows.recipe.recipe import Recipe
from flows.runtime.open_rollouts import (
    PlayedGroups,
    RolloutRunner,
    Spans,
    wait_for_batches,
)
from flows.runtime.open_run import OpenRun
from tasks.evaluations import PlayedShard, Score, score_rollouts
from tasks.reports.artifacts import HELD_OUT
from tasks.shards import ShardSize, draw_shard
from tasks.storage.files import is_written
from tasks.storage.names import shard_name
from tasks.storage.run_folder import RunFolder


class EvaluationResult(BaseModel, frozen=True):
    """Scores of a checkpoint, and the files with its games, by how the rollouts were sampled."""

    file: Path
    scores: dict[str, Score]
    games: dict[str, Path]

    @property
    def outcome(self) -> str:
        """Mean reward of each way of sampling, in words."""
        means = {how: score.finished.mean for how, score in self.scores.items()}
        said = (f"{'unknown' if m is None else f'{m:.2f}'} {how}" for how, m in means.items())
        return f"held-out reward {', '.join(said)}"

    @property
    def tag(self) -> str:
        """Mean reward of sampled rollouts, as the list of flow runs shows it."""
        mean = self.scores["sampled"].finished.mean
        return f"{HELD_OUT} {'unknown' if mean is None else f'{mean:.2f}'}"


HeldOut = Mapping[str, tuple[Path, Sequence[Spans]]]
"""Held-out rollouts that were submitted: a shard and its batches, by how they are sampled."""


def wait_for_held_out(submitted: HeldOut) -> dict[str, PlayedShard]:
    """Wait for every batch; raise the error of the first that failed."""
    return {
        how: PlayedShard(shard, wait_for_batches(batches))
        for how, (shard, batches) in submitted.items()
    }


class HeldOutEvaluations:
    """Evaluations of a run's checkpoints from `first` on, which are played beside the training.

    What is on disk is not played again.
    """

    def __init__(self, recipe: Recipe, run: OpenRun, runner: RolloutRunner, first: int = 0) -> None:
        self._recipe, self._run, self._runner = recipe, run, runner
        self._next = first
        self._submitted: list[tuple[int, HeldOut]] = []

    def submit_due(self, step: int) -> None:
        """Submit what is due up to checkpoint `step`, and neither submitted nor on disk."""
        evaluation, steps = self._recipe.evaluation, self._recipe.steps
        for due in range(self._next, step + 1):
            path = self._run.folder.evaluation(f"{due:05d}")
            if evaluation.due(due, steps) and not is_written(path):
                held_out = submit_held_out(self._recipe, self._run.folder, self._runner, due)
                self._submitted.append((due, held_out))
        self._next = max(self._next, step + 1)

    def score(self, last: int) -> None:
        """Wait for what was submitted of the checkpoints up to `last`, and score it."""
        folder = self._run.folder
        while self._submitted and self._submitted[0][0] <= last:
            step, held_out = self._submitted.pop(0)
            path, threshold = folder.evaluation(f"{step:05d}"), self._recipe.evaluation.threshold
            score_rollouts(path, wait_for_held_out(held_out), threshold)


def submit_held_out(
    recipe: Recipe, run: RunFolder, runner: RolloutRunner, step: int, tag: str = ""
) -> HeldOut:
    """Submit the held-out examples to checkpoint `step`, sampled and, if asked for, greedily.

    `tag` keeps apart what other settings have played.
    """
    evaluation, source = recipe.evaluation, recipe.dataset.held_out_split()
    groups = min(evaluation.examples, len(source.examples()))
    size = ShardSize(groups, recipe.rollouts.batches)

    def submit(split: str, sampling: Sampling, group_size: int) -> tuple[Path, Sequence[Spans]]:
        path = run.shard(shard_name(f"{split}{tag}", step))
        shard = draw_shard(path, source, recipe.seed, 0, size)
        groups = PlayedGroups(sampling, group_size, roles=evaluation.roles)
        batches = runner.submit_shard(shard, step, groups)
        return shard, [*batches.values()]

    shards = {"sampled": submit("test", recipe.rollouts.sampling(), evaluation.rollouts)}
    if evaluation.greedy:
        shards["greedy"] = submit("greedy", recipe.rollouts.greedy_sampling(), 1)
    return shards
