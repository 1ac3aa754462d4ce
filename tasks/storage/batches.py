"""The batches of a shard: which of its rollouts each one plays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ratchet.tasks.storage.files import JsonRow, read_rows
from ratchet.tasks.storage.names import batch_name, rollout_name


@dataclass(frozen=True)
class ShardBatch:
    """Part of a shard that one task plays, each example `group_size` times.

    A rollout that fails is played again until it has been played `attempts` times.
    """

    shard: str
    number: int
    group_size: int
    attempts: int = 1

    @classmethod
    def of_round(cls, shard: Path, number: int, group_size: int, attempts: int) -> list[Self]:
        """List the batches of round `number` of a shard."""
        numbers = sorted({row["batch"] for row in read_rows(shard) if row["round"] == number})
        return [cls(shard.stem, batch, group_size, attempts) for batch in numbers]

    @property
    def name(self) -> str:
        return batch_name(self.shard, self.number)

    def examples(self, shard: Path) -> list[tuple[str, JsonRow]]:
        """Return (rollout id, example) of every rollout of the batch."""
        return [
            (rollout_name(self.shard, example, index), row)
            for example, row in enumerate(read_rows(shard))
            if row["batch"] == self.number
            for index in range(self.group_size)
        ]
