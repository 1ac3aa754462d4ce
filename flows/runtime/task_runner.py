"""Runner of rollout batches: Prefect's task runner, and the function that plays one batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from adapters.calls import Policy, Sampling
from adapters.door.batches import SampledBy
from adapters.harness.batches import play_batch
from flows.recipe.recipe import Recipe
from flows.recipe.rollouts import Rollouts
from flows.runtime.open_run import OpenRun, greedy_sampling, training_sampling
from tasks.algorithm.advantages import find_advantage
from tasks.rollouts import BatchPlan, Play, collect_rollouts
from tasks.shards import read_shard
from tasks.storage.run_folder import BASELINE

EVALUATED_SHARDS = 2
"""Shards of an evaluation: one is sampled, one is played greedily."""

Spans = PrefectFuture[Path]
"""Future of a batch's sealed spans."""

CheckpointOf = Callable[[str], int]
"""Gives, for the name of a batch that begins, the checkpoint that samples it."""


@dataclass(frozen=True)
class PlayedGroups:
    """Plan of a shard's groups: the sampling, their size, the attempts at a rollout, the quorum.

    With a sampling of the `baseline`, each example is played by it once more.
    """

    sampling: Sampling
    size: int
    attempts: int = 1
    quorum: float = 1.0
    baseline: Sampling | None = None


def training_groups(recipe: Recipe) -> PlayedGroups:
    """Return the plan of a training step's groups."""
    rollouts, compared = recipe.rollouts, find_advantage(recipe.algorithm.advantage)
    return PlayedGroups(
        training_sampling(recipe),
        rollouts.group_size,
        rollouts.attempts,
        rollouts.quorum,
        greedy_sampling(recipe) if compared.by_greedy else None,
    )


@dataclass(frozen=True)
class RolloutRunner:
    """Runner of rollout batches as parallel Prefect tasks.

    `policies` gives, for a checkpoint, the policies that answer a batch, by name.
    """

    tasks: ThreadPoolTaskRunner[Path]
    play: Play
    policies: Callable[[int], Mapping[str, Policy]]

    def submit_shard(
        self,
        run: OpenRun,
        shard: Path,
        checkpoint: CheckpointOf,
        groups: PlayedGroups,
        number: int = 0,
    ) -> dict[str, Spans]:
        """Submit the batches of round `number` of a shard; return them by name."""
        batches = sorted({row["batch"] for row in read_shard(shard) if row["round"] == number})
        plans = [
            (
                BatchPlan(shard.stem, batch, groups.size, groups.attempts, groups.quorum),
                groups.sampling,
            )
            for batch in batches
        ]
        if groups.baseline is not None:
            name = f"{BASELINE}-{shard.stem.partition('-')[2]}"
            plans += [
                (BatchPlan(name, batch, 1, groups.attempts), groups.baseline) for batch in batches
            ]

        def sampled_by(batch: str, sampling: Sampling) -> SampledBy:
            return SampledBy(self.policies(checkpoint(batch)), sampling)

        return {
            plan.name: self.tasks.submit(
                collect_rollouts,
                {
                    "path": run.folder.spans(plan.name),
                    "shard": shard,
                    "plan": plan,
                    "server": run.rollouts,
                    "sampled_by": partial(sampled_by, plan.name, sampling),
                    "play": self.play,
                },
            )
            for plan, sampling in plans
        }


def wait_for_batches(batches: Iterable[Spans]) -> Sequence[Spans]:
    """Wait until all batches have ended; raise the error of the first that failed."""
    waited = [*batches]
    for batch in waited:
        batch.wait()
    for batch in waited:
        batch.result()
    return waited


@dataclass(frozen=True)
class RolloutRunners:
    """Runners of a run's batches, each with places of its own."""

    training: RolloutRunner
    evaluation: RolloutRunner


@contextmanager
def task_runners(
    rollouts: Rollouts, run: OpenRun, played: PlayedGroups | None = None
) -> Iterator[RolloutRunners]:
    """Run batches as tasks in threads of the flow's process, as many as are `played` at a time.

    A thread plays its batch, or waits for the cluster that plays it. An error of the flow cancels
    the batches that are under way.
    """
    inflight = rollouts.weights == "inflight"
    policies = run.policies.at_or_newer if inflight else run.policies.at
    batches = rollouts.batches
    playing, evaluating = batches * rollouts.steps_under_way(), batches * EVALUATED_SHARDS
    if played is not None and played.baseline is not None:
        playing *= 2
    with (
        _player(rollouts, playing + evaluating) as play,
        ThreadPoolTaskRunner[Path](max_workers=playing) as tasks,
        ThreadPoolTaskRunner[Path](max_workers=evaluating) as evaluations,
    ):
        try:
            yield RolloutRunners(
                RolloutRunner(tasks, play, policies),
                RolloutRunner(evaluations, play, run.policies.at),
            )
        except BaseException:
            run.rollouts.cancel()
            raise


@contextmanager
def _player(rollouts: Rollouts, places: int) -> Iterator[Play]:
    if rollouts.runner == "threads":
        yield play_batch
        return
    from adapters.harness.dask_cluster import open_cluster  # Dask is an extra

    with open_cluster(rollouts.cluster, places) as cluster:
        yield cluster.play
