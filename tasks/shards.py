"""examples → shards: the examples of each step, by a seeded curriculum."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tasks.examples.curricula import Curriculum
from tasks.examples.reading import SHUFFLED, Example, Source
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
    examples = choose(source.examples(), seed, step, size, source.curriculum)
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


def choose(
    examples: Sequence[Example],
    seed: int,
    step: int,
    size: int,
    curriculum: Curriculum = SHUFFLED,
) -> list[Example]:
    """Choose the `size` examples of step `step`.

    With `pass_rate` these are the first of a ranking, from its begin again if it is too short.
    Any other order is an endless series of passes, in which the end of a pass drops nothing: the
    next pass begins within the same shard, so a shard may hold an example twice. No state is kept:
    any step can be asked for at any time.
    """
    if size < 1 or step < 0:
        raise ValueError(f"a shard needs size >= 1 and step >= 0, got size {size}, step {step}")
    count = len(examples)
    if curriculum.order == "pass_rate":
        by_id = {row["example_id"]: row for row in examples}
        ranked = curriculum.rank([*by_id], seed)
        return [by_id[ranked[place % count]] for place in range(size)]
    places = [divmod(place, count) for place in range(step * size, (step + 1) * size)]
    column = curriculum.difficulty
    difficulties = [0.0 if column is None else float(row["example"][column]) for row in examples]
    turns = {turn for turn, _ in places}
    passes = {turn: curriculum.order_pass(difficulties, seed, turn) for turn in turns}
    return [examples[passes[turn][position]] for turn, position in places]
