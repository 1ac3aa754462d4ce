"""The rollouts of an open run: the door that answers them, and the runners of their batches."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prefect.futures import PrefectConcurrentFuture, wait
from prefect.task_runners import ThreadPoolTaskRunner

from ratchet.adapters.calls import Policy, Sampling
from ratchet.adapters.door.backends import create_backends
from ratchet.adapters.door.batches import PlaySettings, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.stand_in import StandInDoor
from ratchet.adapters.errors import counted
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.process.open_files import FILES_REMEDY, OutOfFiles, most_rollouts
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.service import Lifeline
from ratchet.flows.checkpoints.binding import open_checkpoints
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.ends import Check, check_held_out, check_rewards, check_step, reopen_stopped
from ratchet.tasks.judging import check_verdicts
from ratchet.tasks.rollouts import Play, RolloutHost, collect_rollouts
from ratchet.tasks.settings.rollouts import Judge, Rollouts
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

EVALUATED_SHARDS = 2
"""Shards of an evaluation: one sampled, one greedy."""

JUDGE_ATTEMPTS = 3
"""Times that a group is judged until the judge has not failed."""

Spans = PrefectConcurrentFuture[Path]
"""Future of a batch's sealed spans."""


@dataclass(frozen=True)
class GroupSettings:
    """Groups of a shard as they are played: sampling, size, attempts at a rollout, rewarded errors.

    `roles` says who answers a role in place of training's policy.
    """

    sampling: Sampling
    size: int
    attempts: int = 1
    rewarded: Mapping[str, float] = field(default_factory=dict[str, float])
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    seed: int | None = None


def training_groups(recipe: Recipe) -> GroupSettings:
    rollouts = recipe.rollouts
    rewarded = rollouts.rewards_of_errors()
    return GroupSettings(rollouts.sampling(), rollouts.group_size, rollouts.attempts, rewarded)


@dataclass(frozen=True)
class RolloutRunner:
    """Runner of rollout batches as parallel Prefect tasks.

    `policies` returns the policies that answer a batch at a checkpoint, by name. `check` raises
    StepStopped if the sealed batches of a shard have too few rewards to go on.
    """

    host: RolloutHost
    tasks: ThreadPoolTaskRunner[Path]
    play: Play
    policies: Callable[[int], Mapping[str, Policy]]
    check: Check

    def submit_shard(
        self, shard: Path, checkpoint: int, groups: GroupSettings, number: int = 0
    ) -> list[Spans]:
        """Submit the batches of round `number` of a shard.

        A shard at which `check` stopped the run before is played anew.
        """
        if number == 0:
            reopen_stopped(self.host.run, shard.stem, self.check)
        played = groups.size, groups.attempts, groups.rewarded
        batches = ShardBatch.of_round(shard, number, *played)

        def sampled_by() -> SampledBy:
            return SampledBy(self.policies(checkpoint), groups.sampling, groups.roles, groups.seed)

        asked = {"shard": shard, "host": self.host, "sampled_by": sampled_by, "play": self.play}
        return [
            self.tasks.submit(
                collect_rollouts, {**asked, "path": self.host.run.spans(batch.name), "batch": batch}
            )
            for batch in batches
        ]

    def wait_for(self, batches: Sequence[Spans]) -> list[Path]:
        """Wait until all batches of a shard have ended, and check them.

        Raise the error of the first that failed.
        """
        wait([*batches])
        spans = [batch.result() for batch in batches]
        if warning := self.check(spans):
            log.warning("%s", warning)
        return spans


def ask_judge(runner: RolloutRunner, judge: Judge, shard: Path, step: int) -> list[Path]:
    """Have a judge play its examples in a shard; return its sealed batches.

    StepStopped if the judge failed at too many; a run that is continued asks it anew.
    """
    groups = GroupSettings(judge.sampling(), 1, JUDGE_ATTEMPTS)
    return runner.wait_for(runner.submit_shard(shard, step, groups))


@dataclass(frozen=True)
class OpenRollouts:
    """Runners of a run's batches, and the chat of the policies.

    Training and evaluation have threads of their own, each shared with its judge.
    """

    training: RolloutRunner
    judging: RolloutRunner
    evaluation: RolloutRunner
    examining: RolloutRunner
    chat: Chat


@contextmanager
def open_rollouts(run: OpenRun, recipe: Recipe) -> Iterator[OpenRollouts]:
    """Answer and play the rollouts of a run, as many batches at a time as its recipe says.

    A batch is a task in a thread of the flow's process, which plays it or waits for the cluster
    that plays it. An error of the flow cancels the batches that are under way.
    """
    rollouts = recipe.rollouts
    run.unusable.set()
    backends, listener = create_backends(recipe.answerers, recipe.seed), door_listener(rollouts)
    chat, sent = run.chat(recipe.model), recipe.sent_calls()
    with (
        Door(chat, backends, recipe.seed, rollouts.max_calls, listener, sent) as door,
        _player(rollouts, door) as play,
    ):
        fixed = open_checkpoints(recipe, run.folder, run.service)

        def at(step: int) -> Mapping[str, Policy]:
            earlier = run.policies.earlier(recipe.earlier(step))
            return {**run.policies.at(step), **fixed, **earlier}

        with _runners(run.folder, recipe, door, run.service, play, at) as opened:
            run.unusable.clear()
            yield opened


@contextmanager
def open_told_rollouts(run: RunFolder, recipe: Recipe, door: StandInDoor) -> Iterator[OpenRollouts]:
    """Play the rollouts of a run at a door with a stand-in: no service is asked, none can die."""
    play, lifeline = partial(play_batch, reach=door.near), Lifeline(Future())
    with door, _runners(run, recipe, door, lifeline, play, lambda _: {}) as opened:
        yield opened


@contextmanager
def _runners(
    run: RunFolder,
    recipe: Recipe,
    door: Door,
    lifeline: Lifeline,
    play: Play,
    policies: Callable[[int], Mapping[str, Policy]],
) -> Iterator[OpenRollouts]:
    """Yield the runners of a run, whose batches an error of the block cancels."""
    rollouts, judge, examiner = recipe.rollouts, recipe.judge, recipe.evaluation.judge
    playing, evaluating = _batches_at_once(rollouts)
    concurrency = _concurrency(rollouts, playing + evaluating)
    places, limit = recipe.place.of(run.places), rollouts.timeout_seconds
    limits = {"most_failed": rollouts.most_failed}
    with (
        ThreadPoolTaskRunner[Path](max_workers=playing) as training,
        ThreadPoolTaskRunner[Path](max_workers=evaluating) as evaluations,
    ):

        def runner(
            tasks: ThreadPoolTaskRunner[Path],
            check: Check,
            by: Judge | None = None,
            *,
            judged: bool = False,
        ) -> RolloutRunner:
            settings = PlaySettings(*recipe.plays(by), concurrency, limit, None if by else places)
            host = RolloutHost(run, door, lifeline, settings, judged=judged)
            return RolloutRunner(host, tasks, play, policies, check)

        opened = OpenRollouts(
            runner(training, partial(check_step, **limits), judged=judge.judges),
            runner(training, partial(check_rewards, **limits), judge),
            runner(evaluations, check_of_held_out(recipe), judged=judge.judges or examiner.judges),
            runner(evaluations, partial(check_verdicts, **limits), examiner),
            door.chat,
        )
        try:
            yield opened
        except BaseException:
            for one in (opened.training, opened.judging, opened.evaluation, opened.examining):
                one.host.cancel()
            raise


def check_of_held_out(recipe: Recipe, *, goes_on: bool = False) -> Check:
    """Return the check of held-out rollouts, which have answers of the roles that are trained."""
    roles = {role for of_policy in recipe.policies().values() for role in of_policy}
    return partial(check_held_out, roles=roles, goes_on=goes_on)


def _batches_at_once(rollouts: Rollouts) -> tuple[int, int]:
    """Return how many batches training and evaluations play at a time."""
    return rollouts.batches * (rollouts.lag + 1), rollouts.batches * EVALUATED_SHARDS


def _concurrency(rollouts: Rollouts, batches: int) -> int:
    """Return how many rollouts of a batch run at a time, while `batches` batches do.

    It is the recipe's number, or fewer if the process may not open enough files; OutOfFiles if it
    may not open enough for one rollout a batch.
    """
    wanted, most = rollouts.concurrency_of_batch(), most_rollouts()
    if wanted * batches <= most:
        return wanted
    if most < batches:
        raise OutOfFiles(
            f"the recipe plays {batches} batches at a time, evaluations included, and the limit of "
            f"open files allows {counted(most, 'rollout')}; {FILES_REMEDY}, or give fewer "
            "rollouts.batches"
        )
    few = most // batches
    log.warning(
        "%d of %d rollouts of a batch are played at a time, as the limit of open files allows; to "
        "play all of rollouts.concurrency, %s",
        few,
        wanted,
        FILES_REMEDY,
    )
    return few


@contextmanager
def _player(rollouts: Rollouts, door: Door) -> Iterator[Play]:
    if rollouts.runner == "threads":
        yield partial(play_batch, reach=door.near)
        return
    from ratchet.adapters.harness.dask_cluster import open_cluster  # Dask is an extra

    with open_cluster(rollouts.cluster, sum(_batches_at_once(rollouts))) as cluster:
        yield cluster.play


def door_listener(rollouts: Rollouts) -> Listener:
    """Return where the door listens: on loopback, or where the cluster's workers reach it."""
    if rollouts.door is None:
        return Listener()
    from ratchet.adapters.harness.dask_cluster import listener_at  # Dask is an extra

    return listener_at(rollouts.door)
