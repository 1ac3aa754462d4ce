"""examples → shards: the examples of each step, in seeded passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import cast

from ratchet.tasks.examples.reading import Example, Order, Source
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import read_rows, write_rows


class ShardRow(Example):
    """Example of a shard, the number of the rollout batch that plays it, and the batch's round."""

    batch: int
    round: int


@dataclass(frozen=True)
class ShardSize:
    """Size of a shard: `groups` examples a round, played in `batches` tasks."""

    groups: int
    batches: int = 1
    rounds: int = 1

    def rows(self, examples: Sequence[Example]) -> list[ShardRow]:
        """Assign the examples to rounds and batches, in their order."""
        batches = min(self.batches, self.groups)
        rows: list[ShardRow] = []
        for index, example in enumerate(examples):
            number, group = divmod(index, self.groups)
            batch = number * batches + group * batches // self.groups
            rows.append({**example, "batch": batch, "round": number})
        return rows


@durable
def draw_shard(path: Path, source: Source, seed: int, step: int, size: ShardSize) -> None:
    """Write the examples of a step, one a line.

    The file says which batch plays an example, so a run may go on with another number of batches:
    a shard that was drawn keeps its own.
    """
    count = size.groups * size.rounds
    examples = choose_examples(source.examples(), seed, step, count, source.order)
    write_rows(path, size.rows(examples))


def read_shard(path: Path) -> list[ShardRow]:
    """Read a shard, in its order: an example's index names its group."""
    return cast(list[ShardRow], read_rows(path))


def choose_examples(
    examples: Sequence[Example], seed: int, step: int, size: int, order: Order = "shuffled"
) -> list[Example]:
    """Choose the `size` examples of step `step`.

    They are of an endless series of passes. The end of a pass drops no example: the next pass
    begins within the same shard, so a shard may hold an example twice. No state is kept.
    """
    if size < 1 or step < 0:
        raise ValueError(f"a shard needs size >= 1 and step >= 0, got size {size}, step {step}")
    count = len(examples)
    chosen = [divmod(index, count) for index in range(step * size, (step + 1) * size)]
    turns = {turn for turn, _ in chosen}
    shuffles = order == "shuffled"
    passes = {turn: shuffle_pass(count, seed, turn) if shuffles else range(count) for turn in turns}
    return [examples[passes[turn][position]] for turn, position in chosen]


@lru_cache(maxsize=16)
def shuffle_pass(count: int, seed: int | str, turn: int) -> tuple[int, ...]:
    """Return the shuffled order of pass `turn` over `count` examples, by a keyed hash."""

    def key(example: int) -> bytes:
        return sha256(f"{seed}/{turn}/{example}".encode()).digest()

    return tuple(sorted(range(count), key=key))
