"""examples → shards: the examples of each step, seeded, and a pure function of the step."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import cast

from tasks.examples import Example, Source
from tasks.storage.durability import durable
from tasks.storage.json_files import read_rows, write_rows


class ShardRow(Example):
    """Example of a shard, and the number of the rollout batch that plays it."""

    batch: int


def write_shard(
    path: Path, source: Source, seed: int, step: int, size: int, batches: int = 1
) -> None:
    """Write the examples of a step, one a line, split into `batches` rollout batches.

    The file says which batch plays an example, so a run may go on with another number of batches:
    a shard that was drawn keeps its own.
    """
    examples = choose(source.examples(), seed, step, size)
    rows = [
        {**example, "batch": place * min(batches, size) // size}
        for place, example in enumerate(examples)
    ]
    write_rows(path, rows)


draw_shard = durable("draw_shard", write_shard)
"""dataset → shard."""


def read_shard(path: Path) -> list[ShardRow]:
    """Read a shard, in its order: an example's place names its group."""
    return cast(list[ShardRow], read_rows(path))


def choose(examples: Sequence[Example], seed: int, step: int, size: int) -> list[Example]:
    """Choose the `size` examples of step `step` from an endless series of shuffled passes.

    The end of a pass drops nothing: the next pass begins within the same shard, so a shard may
    hold an example twice. No state is kept: any step can be asked for at any time.
    """
    if size < 1 or step < 0:
        raise ValueError(f"a shard needs size >= 1 and step >= 0, got size {size}, step {step}")
    count = len(examples)
    places = (divmod(place, count) for place in range(step * size, (step + 1) * size))
    return [examples[pass_order(count, seed, turn)[position]] for turn, position in places]


@lru_cache(maxsize=4)
def pass_order(count: int, seed: int, turn: int) -> tuple[int, ...]:
    """Return the shuffled order of pass `turn` over `count` examples, by a keyed hash."""
    return tuple(sorted(range(count), key=lambda place: sha256(_key(seed, turn, place)).digest()))


def _key(seed: int, turn: int, place: int) -> bytes:
    return f"{seed}/{turn}/{place}".encode()
