"""Evaluation of a checkpoint: held-out examples are played, sampled and greedily, and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from adapters.calls import Sampling
from flows.recipe.recipe import Recipe
from flows.runtime.open_rollouts import (
    PlayedGroups,
    RolloutRunner,
    Spans,
    greedy_sampling,
    training_sampling,
    wait_for_batches,
)
from flows.runtime.open_run import OpenRun
from tasks.evaluations import PlayedShard, Score, score_rollouts
from tasks.shards import ShardSize, draw_shard
from tasks.storage.files import is_written
from tasks.storage.names import shard_name
from tasks.storage.run_folder import RunFolder


class EvaluationResult(BaseModel):
    """Scores of a checkpoint, and the files with its games, by how the rollouts were sampled."""

    model_config = ConfigDict(frozen=True)

    file: Path
    scores: dict[str, Score]
    games: dict[str, Path]

    @property
    def outcome(self) -> str:
        """Mean reward of each way of sampling, in words."""
        means = {how: score.finished.mean for how, score in self.scores.items()}
        said = (f"{'unknown' if m is None else f'{m:.2f}'} {how}" for how, m in means.items())
        return f"held-out reward {', '.join(said)}"


@dataclass(frozen=True)
class HeldOut:
    """Held-out rollouts that were submitted: a shard and its batches, by how they are sampled."""

    shards: Mapping[str, tuple[Path, Sequence[Spans]]]

    def wait(self) -> dict[str, PlayedShard]:
        """Wait for every batch; raise the error of the first that failed."""
        return {
            how: PlayedShard(shard, wait_for_batches(batches))
            for how, (shard, batches) in self.shards.items()
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
        while self._submitted and self._submitted[0][0] <= last:
            step, held_out = self._submitted.pop(0)
            write_scores(self._recipe, self._run.folder, held_out.wait(), f"{step:05d}")


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
        played = PlayedGroups(sampling, group_size)
        batches = runner.submit_shard(shard, step, played)
        return shard, [*batches.values()]

    shards = {"sampled": submit("test", training_sampling(recipe), evaluation.rollouts)}
    if evaluation.greedy:
        shards["greedy"] = submit("greedy", greedy_sampling(recipe), 1)
    return HeldOut(shards)


def write_scores(
    recipe: Recipe, run: RunFolder, played: Mapping[str, PlayedShard], name: str
) -> Path:
    """Score held-out rollouts, and return the file of their scores."""
    return score_rollouts(run.evaluation(name), played, recipe.evaluation.threshold)


def settings_tag(bound: Recipe, asked: Recipe) -> str:
    """Name the settings of an evaluation; empty if they are the run's own."""
    if asked.evaluation == bound.evaluation:
        return ""
    return f".{asked.fingerprint()[:6]}"
