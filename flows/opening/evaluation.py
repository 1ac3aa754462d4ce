"""Evaluation of a checkpoint: held-out examples are played (sampled, or greedily) and scored."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from ratchet.adapters.calls import Sampling
from ratchet.adapters.errors import counted
from ratchet.flows.opening.rollouts import (
    GroupSettings,
    OpenRollouts,
    RolloutRunner,
    Spans,
    ask_judge,
    check_of_held_out,
)
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.opening.step_records import EarlyEnd
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.ends import find_failed, reopen_failed, reopen_unanswered
from ratchet.tasks.evaluations import JudgedShard, PlayedShard, score_rollouts
from ratchet.tasks.examples.shards import ShardSize, draw_shard, read_shard
from ratchet.tasks.judging import draw_held_out, verdicts_of
from ratchet.tasks.recording.scores import Score, headline, is_scored
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.names import EXAMINER, HELD_OUT_SPLITS, shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.tracking.prefect_pages import HELD_OUT

log = logging.getLogger(__name__)


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


class HeldOutEvaluations:
    """Evaluations of a run's checkpoints from `first` on, played while the run trains.

    An evaluation that has scores is not played again. The training goes on after one of which all
    rollouts have failed, which has none.
    """

    def __init__(self, recipe: Recipe, run: OpenRun, runners: OpenRollouts, first: int = 0) -> None:
        going_on = replace(runners.evaluation, check=check_of_held_out(recipe, goes_on=True))
        self._recipe, self._run = recipe, run
        self._runners = replace(runners, evaluation=going_on)
        self._early_end = EarlyEnd(recipe, run.folder)
        self._next = first
        self._submitted: list[tuple[int, HeldOutShards]] = []

    def begin(self) -> None:
        """Submit what is due before the first step that is left."""
        start = self._run.steps_left().start
        self._submit_due(start)
        self.decide(start - 1)  # again, if its record is gone

    def decide(self, step: int) -> None:
        """Let the scores before a step, which is not trained yet, decide whether the run ends."""
        if self._recipe.stop.is_given:
            last = step - self._recipe.rollouts.lag
            self._score(last)
            self._early_end.look(last)

    def go_on(self, step: int) -> None:
        """Submit what is due after a step, and score what has been played meanwhile."""
        self._submit_due(step + 1)
        self._score(step - self._recipe.rollouts.lag)

    def end(self) -> None:
        """Score what is left."""
        self._score(self._run.end())

    def _submit_due(self, step: int) -> None:
        """Submit evaluations due up to checkpoint `step` that are not submitted, nor on disk."""
        evaluation, steps = self._recipe.evaluation, self._run.end()
        if not self._recipe.holds_out():
            return
        for due in range(self._next, step + 1):
            path = self._run.folder.evaluation(f"{due:05d}")
            if evaluation.due(due, steps) and not is_scored(path):
                runner = self._runners.evaluation
                held_out = submit_held_out(self._recipe, self._run.folder, runner, due)
                self._submitted.append((due, held_out))
        self._next = max(self._next, step + 1)

    def _score(self, last: int) -> None:
        """Wait for the submitted evaluations of checkpoints up to `last`, and score them."""
        while self._submitted and self._submitted[0][0] <= last:
            step, held_out = self._submitted.pop(0)
            score_held_out(self._recipe, self._run.folder, self._runners, held_out, step)


def score_held_out(
    recipe: Recipe,
    run: RunFolder,
    runners: OpenRollouts,
    submitted: HeldOutShards,
    step: int,
    tag: str = "",
) -> dict[str, PlayedShard]:
    """Wait for every batch, and score them; raise the error of the first that failed.

    StepStopped if no rollout of a shard was answered, unless the runner goes on; a shard that is
    submitted again is then played anew.
    """
    wait = runners.evaluation.wait_for
    played = {how: PlayedShard(shard, wait(of)) for how, (shard, of) in submitted.items()}
    judged = examine(recipe, run, runners, step, played["sampled"], tag)
    file, threshold = run.evaluation(f"{step:05d}{tag}"), recipe.evaluation.threshold
    durable(score_rollouts)(file, played, threshold, judged)
    return played


def submit_held_out(
    recipe: Recipe, run: RunFolder, runner: RolloutRunner, step: int, tag: str = ""
) -> HeldOutShards:
    """Submit the held-out examples to checkpoint `step`, sampled and, if asked for, greedily.

    `tag` keeps rollouts by other settings apart. What an earlier evaluation has left is no result
    if nothing was answered in it.
    """
    if not is_scored(run.evaluation(f"{step:05d}{tag}")):
        run.forget_evaluation(step, tag)
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
    rewarded = recipe.rollouts.rewards_of_errors()
    shard = draw_shard(path, source, seed, 0, size)
    reopen_unanswered(runner.host.run, shard.stem)
    groups = GroupSettings(sampling, group_size, 1, rewarded, evaluation.roles, evaluation.seed)
    return shard, runner.submit_shard(shard, step, groups)


def reopen_evaluation(run: RunFolder, step: int, tag: str = "") -> None:
    """Have the failed rollouts of an evaluation played again, and the evaluation scored anew.

    A judge is shown the rollouts that have ended, so it is asked anew.
    """
    shards = [shard_name(f"{split}{tag}", step) for split in HELD_OUT_SPLITS]
    failed = {name: of for shard in shards for name, of in find_failed(run, shard)[0].items()}
    if not failed:
        log.warning("no held-out rollout of %s at checkpoint %d has failed", run.name, step)
        return
    run.forget_evaluation(step, tag)
    run.withdraw(shard_name(f"{EXAMINER}{tag}", step))
    reopen_failed(run, failed)


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
    the judge failed at too many, or scored none.
    """
    judge = recipe.evaluation.judge
    if not judge.judges:
        return None
    others = list[Path]()
    if judge.shown() == "pair":
        if step == 0:
            return JudgedShard(played, None)
        _, start = submit_sampled(recipe, run, runners.evaluation, 0, tag)
        others = runners.evaluation.wait_for(start)
    path = run.shard(shard_name(f"{EXAMINER}{tag}", step))
    seed = recipe.evaluation.drawn_by(recipe.seed)
    shard = draw_held_out(path, played.spans, others, judge, seed)
    if not read_shard(shard):  # of no example have both rollouts ended
        return JudgedShard(played, {})
    spans = ask_judge(runners.examining, judge, shard, step)
    return JudgedShard(played, verdicts_of(spans), PlayedShard(shard, spans))
