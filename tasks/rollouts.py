"""shard → rollouts: the agent, `group_size` times an example, played in batches and journalled."""

from collections.abc import Callable
from pathlib import Path

from adapters.door.batches import OpenBatch, SampledBy
from adapters.errors import UserError
from tasks.playing.recorder import JournalRecorder
from tasks.playing.server import Play, RolloutServer
from tasks.recording.journal import Journal, seal
from tasks.shards import BatchPlan
from tasks.storage.durability import durable


@durable
def collect_rollouts(
    path: Path,
    shard: Path,
    plan: BatchPlan,
    server: RolloutServer,
    sampled_by: Callable[[], SampledBy],
    play: Play,
) -> None:
    """Play what is left of a batch, and seal its journal into Parquet."""
    with Journal(server.run.journal(plan.name)) as journal:
        recorder = JournalRecorder(server, plan, shard, journal)
        if not recorder.finished:
            batch = OpenBatch(plan.name, recorder, sampled_by(), server.settings)
            while not recorder.finished:
                try:
                    server.play(batch, play)
                except UserError as error:
                    raise recorder.fault or error from error
                recorder.check_service()
    seal(journal.path, path)
