"""Evaluation of a checkpoint: held-out examples are played (sampled, or greedily) and scored."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from adapters.calls import Sampling
from adapters.errors import counted
from flows.recipe.recipe import Recipe
from flows.runtime.open_rollouts import (
    OpenRollouts,
    PlayedGroups,
    RolloutRunner,
    Spans,
    ask_judge,
    wait_for_batches,
)
from flows.runtime.open_run import OpenRun
from tasks.evaluations import JudgedShard, PlayedShard, score_rollouts
from tasks.judging import draw_held_out, verdicts_of
from tasks.recording.scores import Score, headline
from tasks.rollouts import check_held_out
from tasks.shards import ShardSize, draw_shard, read_shard
from tasks.storage.files import is_written
from tasks.storage.names import EXAMINER, shard_name
from tasks.storage.run_folder import RunFolder
from tasks.tracking.prefect_pages import HELD_OUT


class EvaluationResult(BaseModel, frozen=True):
    """Scores of a checkpoint, and the files with its games, by how the rollouts were sampled."""

    file: Path
    scores: dict[str, Score]
    games: dict[str, Path]

    @property
    def outcome(self) -> str:
        """Mean reward of each way of sampling, as a sentence."""
        means = {how: score.finished.mean for how, score in self.scores.items()}
        said = (f"{'unknown' if m is None else f'{m:.2f}'} {how}" for how, m in means.items())
        failed = {how: score.failed for how, score in self.scores.items() if score.failed}
        left = (f"; {counted(n, 'rollout')} failed, {how}" for how, n in failed.items())
        return f"held-out reward {', '.join(said)}{''.join(left)}"

    @property
    def tag(self) -> str:
        """Mean reward of the checkpoint, as the list of flow runs shows it."""
        mean = headline(self.scores).mean
        return f"{HELD_OUT} {'unknown' if mean is None else f'{mean:.2f}'}"


Submitted = tuple[Path, Sequence[Spans]]
"""Held-out shard that was submitted, and its batches."""

HeldOutShards = Mapping[str, Submitted]
"""Held-out shards that were submitted, by how they are sampled."""


def wait_for_held_out(submitted: HeldOutShards) -> dict[str, PlayedShard]:
    """Wait for every batch; raise the error of the first that failed.

    StepStopped if no rollout of a shard has a reward; a shard that is submitted again is then
    played anew.
    """
    return {how: PlayedShard(shard, _wait(batches)) for how, (shard, batches) in submitted.items()}


def _wait(batches: Sequence[Spans]) -> list[Path]:
    spans = wait_for_batches(batches)
    check_held_out(spans)
    return spans


class HeldOutEvaluations:
    """Evaluations of a run's checkpoints from `first` on, played while the run trains.

    An evaluation whose file exists is not played again.
    """

    def __init__(self, recipe: Recipe, run: OpenRun, runners: OpenRollouts, first: int = 0) -> None:
        self._recipe, self._run, self._runners = recipe, run, runners
        self._next = first
        self._submitted: list[tuple[int, HeldOutShards]] = []

    def submit_due(self, step: int) -> None:
        """Submit evaluations due up to checkpoint `step` that are not submitted, nor on disk."""
        evaluation, steps = self._recipe.evaluation, self._recipe.steps
        if not self._recipe.holds_out():
            return
        for due in range(self._next, step + 1):
            path = self._run.folder.evaluation(f"{due:05d}")
            if evaluation.due(due, steps) and not is_written(path):
                runner = self._runners.evaluation
                held_out = submit_held_out(self._recipe, self._run.folder, runner, due)
                self._submitted.append((due, held_out))
        self._next = max(self._next, step + 1)

    def score(self, last: int) -> None:
        """Wait for the submitted evaluations of checkpoints up to `last`, and score them."""
        folder = self._run.folder
        while self._submitted and self._submitted[0][0] <= last:
            step, held_out = self._submitted.pop(0)
            path, threshold = folder.evaluation(f"{step:05d}"), self._recipe.evaluation.threshold
            played = wait_for_held_out(held_out)
            judged = examine(self._recipe, folder, self._runners, step, played["sampled"])
            score_rollouts(path, played, threshold, judged)


def submit_held_out(
    recipe: Recipe, run: RunFolder, runner: RolloutRunner, step: int, tag: str = ""
) -> HeldOutShards:
    """Submit the held-out examples to checkpoint `step`, sampled and, if asked for, greedily.

    `tag` keeps rollouts by other settings apart.
    """
    shards = {"sampled": submit_sampled(recipe, run, runner, step, tag)}
    if recipe.evaluation.greedy:
        path = run.shard(shard_name(f"greedy{tag}", step))
        shards["greedy"] = _submit(recipe, path, runner, step, recipe.rollouts.greedy_sampling(), 1)
    return shards


def submit_sampled(
    recipe: Recipe, run: RunFolder, runner: RolloutRunner, step: int, tag: str = ""
) -> Submitted:
    """Submit the held-out examples to checkpoint `step`, sampled as in training."""
    path, sampling = run.shard(shard_name(f"test{tag}", step)), recipe.rollouts.sampling()
    return _submit(recipe, path, runner, step, sampling, recipe.evaluation.rollouts)


def _submit(
    recipe: Recipe,
    path: Path,
    runner: RolloutRunner,
    step: int,
    sampling: Sampling,
    group_size: int,
) -> Submitted:
    evaluation, source = recipe.evaluation, recipe.held_out_split()
    count = min(evaluation.examples, len(source.examples()))
    size, seed = ShardSize(count, recipe.rollouts.batches), evaluation.drawn_by(recipe.seed)
    shard = draw_shard(path, source, seed, 0, size)
    groups = PlayedGroups(sampling, group_size, roles=evaluation.roles)
    return shard, [*runner.submit_shard(shard, step, groups).values()]


def examine(
    recipe: Recipe,
    run: RunFolder,
    runners: OpenRollouts,
    step: int,
    played: PlayedShard,
    tag: str = "",
) -> JudgedShard | None:
    """Have the judge of evaluations score the rollouts of checkpoint `step`; None without a judge.

    A judge of pairs compares each with checkpoint 0's rollout of the same example. StepStopped if
    the judge failed at too many.
    """
    judge = recipe.evaluation.judge
    if not judge.judges:
        return None
    others = list[Path]()
    if judge.shown() == "pair":
        if step == 0:
            return JudgedShard(played, None)
        _, start = submit_sampled(recipe, run, runners.evaluation, 0, tag)
        others = _wait(start)
    path = run.shard(shard_name(f"{EXAMINER}{tag}", step))
    shard = draw_held_out(path, played.spans, others, judge, recipe.seed)
    if not read_shard(shard):  # every rollout has failed
        return JudgedShard(played, {})
    spans = ask_judge(runners.examining, judge, shard, step)
    return JudgedShard(played, verdicts_of(spans), PlayedShard(shard, spans))
