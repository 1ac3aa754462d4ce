"""Runner of rollout batches: Prefect's task runner, and the function that plays one batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from adapters.calls import Sampling
from adapters.door.batches import SampledBy
from adapters.harness.batches import play_batch
from flows.recipe import Rollouts
from flows.runtime.open_run import OpenRun
from tasks.rollouts import BatchPlan, Play, collect_rollouts
from tasks.shards import read_shard

Spans = PrefectFuture[Path]
"""Future of a batch's sealed spans."""


@dataclass(frozen=True)
class RolloutRunner:
    """Runner of rollout batches as parallel Prefect tasks."""

    tasks: ThreadPoolTaskRunner[Path]
    play: Play

    def play_shard(
        self,
        run: OpenRun,
        shard: Path,
        step: int,
        sampling: Sampling,
        group_size: int,
        attempts: int = 1,
    ) -> list[Spans]:
        """Play every example of a shard `group_size` times with the policies after `step` updates.

        Returns when all batches have ended; raises the error of the first that failed.
        """
        numbers = sorted({row["batch"] for row in read_shard(shard)})
        plans = [BatchPlan(shard.stem, number, group_size, attempts) for number in numbers]
        batches: list[Spans] = [
            self.tasks.submit(
                collect_rollouts,
                {
                    "path": run.folder.spans(plan.name),
                    "shard": shard,
                    "plan": plan,
                    "server": run.rollouts,
                    "sampled_by": lambda: SampledBy(run.policies.at(step), sampling),
                    "play": self.play,
                },
            )
            for plan in plans
        ]
        for batch in batches:
            batch.wait()
        for batch in batches:
            batch.result()
        return batches


@contextmanager
def task_runner(rollouts: Rollouts) -> Iterator[RolloutRunner]:
    """Run batches in threads of the flow's process, `rollouts.batches` at a time."""
    with ThreadPoolTaskRunner[Path](max_workers=rollouts.batches) as tasks:
        yield RolloutRunner(tasks, play_batch)
