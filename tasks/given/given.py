"""Supervised data: a unit is a text, which has one side, or a preference pair, which has two.

The units become tokens once, in one file; every step of the run takes its datums from it.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.adapters.calls import POLICY
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.datums import DATUM_SCHEMA
from ratchet.tasks.examples.reading import DatasetError, Source
from ratchet.tasks.examples.shards import shuffle_pass
from ratchet.tasks.given.conversations import WeightedTokens, read_unpadded
from ratchet.tasks.given.measures import COUNTS_KEY, HeldOutMeasure, describe_counts
from ratchet.tasks.recording.step_log import Metrics
from ratchet.tasks.recovery.recorded_steps import StepSource
from ratchet.tasks.scoring import Reference
from ratchet.tasks.settings.given import (
    ALONE,
    TEST,
    TRAIN,
    WHOLE,
    Lengths,
    PairBatches,
    Shares,
    TextBatches,
)
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import is_written, write_json
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.tables import arrays, read_table, write_table

T = TypeVar("T")
UnitRow = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """A text, which has one side, or a pair: the sequences of each side.

    A side of several turns may have several sequences. An answer that is `labelled` good or bad,
    and is compared with no other answer, is a pair of one side.
    """

    sides: Mapping[str, list[WeightedTokens]]
    labelled: bool = False

    def sequences(self) -> list[WeightedTokens]:
        return [one for side in self.sides.values() for one in side]


Read = Unit | DatasetError | str
"""A unit, or the fault of its row, or the reason why it is left out."""


class GivenSource(Protocol):
    """Source of units: its name in messages, and the units."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def units(self, chat: Chat) -> Iterator[tuple[int, Read]]:
        """Yield the number of each unit, and what was read of it."""
        ...


@dataclass(frozen=True)
class WrittenUnits(ABC):
    """Units that are made of the rows of a split."""

    rows: Source

    @property
    def name(self) -> str:
        return f"the split '{self.rows.split}' of {self.rows.dataset}"

    def __len__(self) -> int:
        return len(self.rows.examples())

    def units(self, chat: Chat) -> Iterator[tuple[int, Read]]:
        for row in read_unpadded(self.rows):
            number = row["example_id"]
            try:
                yield number, self.read(row["example"], chat)
            except DatasetError as error:
                yield number, DatasetError(f"row {number} of {self.rows.dataset}: {error}")

    @abstractmethod
    def read(self, row: Mapping[str, Any], chat: Chat) -> Read:
        """Return the unit of a row; DatasetError says what is wrong with it."""


@dataclass(frozen=True)
class Drawing:
    """Draws of a step: its batch, the seed of the order, and the sources with their shares.

    A source fills its share of every batch: shares 3 and 1 are three quarters and one.
    """

    batch: TextBatches | PairBatches
    seed: int
    shares: Shares = WHOLE


class Given(ABC):
    """The units of a run as tokens, read once, with what another policy finds in them."""

    schema: ClassVar[pa.Schema]
    """Schema of the file: a row for each sequence."""

    refuses_broken: ClassVar[bool]
    """Whether a broken row ends a run, and is not left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_bound(self) -> bool:
        """Return whether all files are there that the datums of a step are made from."""
        return is_written(self.path)

    def of_split(self, split: str) -> pa.Table:
        """Return the rows of a split, with what another policy finds, in the order of its units."""
        return self.scored.filter(pc.field("split") == split)

    @cached_property
    def table(self) -> pa.Table:
        return read_table(self.path)

    @cached_property
    def scored(self) -> pa.Table:
        """The rows with the columns of what another policy finds in them, if one is asked."""
        return self.table

    @cached_property
    def trained(self) -> Mapping[str, Mapping[int, Sequence[int]]]:
        """Places in `scored` of each trained unit's sequences, by its source and its number."""
        places: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        of_rows = zip(self.scored["split"].to_pylist(), self.names(self.scored), strict=True)
        for place, (split, (source, number)) in enumerate(of_rows):
            if split == TRAIN:
                places[source][number].append(place)
        return places

    @property
    def drawn(self) -> pa.Schema:
        return DATUM_SCHEMA

    def names(self, rows: pa.Table) -> list[tuple[str, int]]:
        """Name the unit of each row, by its source and its number there."""
        return [(ALONE, number) for number in rows["example_id"].to_pylist()]

    def measure(self, datums: Path) -> Metrics:
        """Measure the units of a step before it is trained."""
        return {}

    def check_first(self, update: Path, tolerance: float | None) -> None:  # noqa: B027
        """Refuse (UserError) a first update that another policy shows to be wrong; most do not."""

    @abstractmethod
    def kept(
        self, source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
    ) -> Iterator[tuple[int, Unit]]:
        """Yield the trained parts of a source's units, and count what is lost."""

    @abstractmethod
    def keep(
        self, name: str, source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
    ) -> list[UnitRow]:
        """Return the rows of a source that is named by its split, and count what is lost.

        DatasetError names a row that cannot be used, or a source without a trained token.
        """

    def count_repeated(  # noqa: B027
        self, rows: Mapping[str, Sequence[UnitRow]], counts: Mapping[str, Counter[str]]
    ) -> None:
        """Count the held-out sequences that are trained as well; pairs may repeat a side."""

    @abstractmethod
    def datums(self, units: Sequence[Sequence[UnitRow]], drawing: Drawing) -> Iterator[UnitRow]:
        """Yield the datums of a step's units."""

    @abstractmethod
    def compare(self, rows: pa.Table, policy: Reference) -> HeldOutMeasure:
        """Measure a policy on held-out units."""


LEFT_OUT_LONG = "too long and left out"
"""Name of the count of units that are left out for their length."""


@durable
def bind_given(
    path: Path, given: Given, sources: Mapping[str, GivenSource], chat: Chat, lengths: Lengths
) -> None:
    """Write the tokens of the units of each split, and log what was cut or left out.

    A source is named by its split or, if there are several, by SPLIT/NAME.
    """
    counts = {name: Counter[str]() for name in sources}
    rows = {
        name: given.keep(name, source, chat, lengths, counts[name])
        for name, source in sources.items()
    }
    given.count_repeated(rows, counts)
    for name, source in sources.items():
        log.info("%s: %s", source.name, describe_counts(counts[name]))
    schema = given.schema
    if COUNTS_KEY.encode() in (schema.metadata or {}):
        schema = schema.with_metadata({COUNTS_KEY: json.dumps(counts)})
    write_table(pa.Table.from_pylist([*chain.from_iterable(rows.values())], schema=schema), path)


def leaves_out(lengths: Lengths, length: int, who: str) -> bool:
    """Tell whether a sequence is left out for its length; DatasetError if it is refused."""
    if length > lengths.most_tokens and lengths.too_long == "refuse":
        raise DatasetError(
            f"{who} {length} tokens, and dataset.most_tokens is {lengths.most_tokens}; give more, "
            "or dataset.too_long cut or leave_out"
        )
    return length > lengths.most_tokens and lengths.too_long == "leave_out"


@durable
def draw_given(path: Path, given: Given, drawing: Drawing, step: int) -> None:
    """Write the datums of a step: its units, drawn in passes that the seed shuffles."""
    write_table(datums_of_given(given, drawing, step), path)


def datums_of_given(given: Given, drawing: Drawing, step: int) -> pa.Table:
    """Return the datums of a step, a row for each sequence of its units."""
    numbers = {source: [*units] for source, units in given.trained.items()}
    chosen = [given.trained[one][number] for one, number in choose_units(numbers, drawing, step)]
    taken = iter(rows_of(given.scored.take([place for unit in chosen for place in unit])))
    units = [[next(taken) for _ in unit] for unit in chosen]
    return pa.Table.from_pylist([*given.datums(units, drawing)], schema=given.drawn)


def rows_of(table: pa.Table) -> list[UnitRow]:
    """Return the rows of a table, with lists as arrays."""
    columns = {
        field.name: arrays(table[field.name])
        if pa.types.is_list(field.type)
        else table[field.name].to_pylist()
        for field in table.schema
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@durable
def score_given(path: Path, given: Given, policy: Reference, most: int, seed: int) -> None:
    """Write the measure of a policy on `most` held-out units, the first in a seeded order."""
    table = given.of_split(TEST)
    names = given.names(table)
    drawn = choose_first(names, most, seed)
    rows = table.filter(pa.array([name in drawn for name in names], pa.bool_()))
    write_json(path, given.compare(rows, policy).model_dump())


def choose_units(
    numbers: Mapping[str, Sequence[int]], drawing: Drawing, step: int
) -> list[tuple[str, int]]:
    """Choose the units of a step, each by its source and its number there.

    The sources take turns, and each is drawn in passes of its own.
    """
    turns = take_turns(tuple(share for _, share in drawing.shares))
    size = drawing.batch.size
    draws = range(step * size, (step + 1) * size)
    drawn: list[Iterator[int]] = []
    for at, (source, share) in enumerate(drawing.shares):
        first, last = (
            draw // len(turns) * share + turns[: draw % len(turns)].count(at)
            for draw in (draws.start, draws.stop)
        )
        seed = drawing.seed if source == ALONE else f"{drawing.seed}/{source}"
        drawn.append(iter(draw_numbers(numbers[source], seed, range(first, last))))
    taking = (turns[draw % len(turns)] for draw in draws)
    return [(drawing.shares[at][0], next(drawn[at])) for at in taking]


@lru_cache
def take_turns(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return whose turn each draw of a round is: each source has as many turns as its share.

    In the first n draws a source has its share of n, rounded up or down: its j-th turn falls into
    the window of its j-th part of the round. The source whose window is open and closes
    first has the turn (Baruah et al. 1996).
    """
    total, taken, turns = sum(shares), [0] * len(shares), list[int]()
    for draw in range(total):
        closing = [
            (-(-(taken[at] + 1) * total // share), at)
            for at, share in enumerate(shares)
            if taken[at] * total // share <= draw
        ]
        _, at = min(closing)
        taken[at] += 1
        turns.append(at)
    return tuple(turns)


def draw_numbers(numbers: Sequence[int], seed: int | str, draws: range) -> list[int]:
    """Return the numbers of some draws, in the endless series of passes over them."""
    drawn = [divmod(draw, len(numbers)) for draw in draws]
    return [numbers[shuffle_pass(len(numbers), seed, turn)[at]] for turn, at in drawn]


def choose_first(names: Sequence[T], most: int, seed: int) -> set[T]:
    """Choose the first `most` names in a seeded order, all if there are fewer."""
    known = [*dict.fromkeys(names)]
    drawn = draw_numbers(range(len(known)), seed, range(min(most, len(known))))
    return {known[at] for at in drawn}


@dataclass(frozen=True)
class GivenSteps(StepSource):
    """Source of the main policy's datums that are made of units, whose files `file` names."""

    given: Given
    file: Callable[[str, int], Path]
    drawings: ByStep[Drawing]

    def restore(self, step: int) -> None:
        path = self.file(POLICY, step)
        if not is_written(path) and self.given.is_bound():
            draw_given.make(path, self.given, self.drawings.at(step), step)
