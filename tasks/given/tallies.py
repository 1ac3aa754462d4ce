"""Texts and pairs → what a dry run says of them: rows as they are trained, and counts of all."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import indent

from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import visible
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.given.conversations import WeightedTokens
from ratchet.tasks.given.given import LEFT_OUT_LONG, Given, GivenSource, Read, Unit
from ratchet.tasks.settings.given import Lengths

SHOW_SECONDS = 6.0
"""Seconds for the rows of all splits; rows that are left after them are not counted."""
LONGEST_ROW_SHOWN, MOST_REFUSED = 4000, 5
"""Characters of a row, and refusals, that are shown."""
REFUSED_UNITS = "refused"
TRAINED_BEGIN, TRAINED_END = "⟦", "⟧"
"""Marks around trained tokens."""


@dataclass(frozen=True)
class TrainedRow:
    """A row as it is trained: (word, sequence) pairs; the word says what the sequence is."""

    number: int
    sequences: tuple[tuple[str, WeightedTokens], ...]


@dataclass
class Tally:
    """Counts of a split, its first rows, its longest row, and its refused rows."""

    shown: int
    counts: Counter[str] = field(default_factory=Counter[str])
    first: list[TrainedRow] = field(default_factory=list[TrainedRow])
    longest: tuple[int, int] = (0, 0)
    refused: list[str] = field(default_factory=list[str])
    read: int = 0
    lengths: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Tokens of the sequences of each unit that is kept, by its number."""

    def read_row(self, number: int, sequences: Iterable[WeightedTokens] = ()) -> None:
        self.read += 1
        for one in sequences:
            self.longest = max(self.longest, (len(one.tokens), -number))

    def keep(self, row: TrainedRow) -> None:
        lengths = self.lengths.setdefault(row.number, [])
        lengths += [len(sequence.tokens) for _, sequence in row.sequences]
        if len(self.first) < self.shown:
            self.first.append(row)

    def refuse(self, why: DatasetError) -> None:
        self.counts[REFUSED_UNITS] += 1
        if len(self.refused) < MOST_REFUSED:
            self.refused.append(str(why))


@dataclass(frozen=True)
class _Counted:
    """Source whose rows are counted as they are read, until the time is over.

    If broken rows are refused, it goes on with the next row.
    """

    source: GivenSource
    tally: Tally
    until: float
    refuses_broken: bool

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def units(self, chat: Chat) -> Iterator[tuple[int, Read]]:
        for number, unit in self.source.units(chat):
            self.tally.read_row(number, unit.sequences() if isinstance(unit, Unit) else ())
            if self.refuses_broken and isinstance(unit, DatasetError):
                self.tally.refuse(unit)
            else:
                yield number, unit
            if time.monotonic() >= self.until:
                return


def tally_rows(
    given: Given, sources: Mapping[str, GivenSource], chat: Chat, lengths: Lengths, shown: int
) -> dict[str, Tally]:
    """Make tokens of the rows of each split as a run would, and keep the first ones to be `shown`.

    Rows that would end the run are counted, too.
    """
    tallies: dict[str, Tally] = {}
    refuses = lengths.too_long == "refuse"
    too_long = "leave_out" if refuses else lengths.too_long
    lenient = Lengths(most_tokens=lengths.most_tokens, too_long=too_long)
    for split, source in sources.items():
        until = time.monotonic() + SHOW_SECONDS / len(sources)
        tally = tallies[split] = Tally(shown)
        counting = _Counted(source, tally, until, given.refuses_broken)
        for number, unit in given.kept(counting, chat, lenient, tally.counts):
            own = tuple((side, one) for side, parts in unit.sides.items() for one in parts)
            tally.keep(TrainedRow(number, own))
        if refuses and (count := tally.counts.pop(LEFT_OUT_LONG, 0)):
            tally.counts["too long, which is refused"] = count
    return tallies


def describe_rows(
    tallies: Mapping[str, Tally], sources: Mapping[str, GivenSource], chat: Chat, lengths: Lengths
) -> str:
    """Describe the splits of a recipe: the first rows with what is trained marked, and counts."""
    parts = [
        f"# rows as they are trained\n\nWhat is trained stands in {TRAINED_BEGIN}…{TRAINED_END}."
    ]
    for split, one in tallies.items():
        for row in one.first:
            for side, sequence in row.sequences:
                named = f"{split}, row {row.number}{side and f', {side}'}"
                length = counted(len(sequence.tokens), "token")
                text = indent(_mark(sequence, chat), "    ")
                parts.append(f"{named} ({length}, {len(sequence.trained()):,} trained)\n{text}")
    counts = [_count(name, one, len(sources[name]), chat, lengths) for name, one in tallies.items()]
    return "\n\n".join([*parts, "# counts", *chat.told.values(), *counts])


def _mark(sequence: WeightedTokens, chat: Chat) -> str:
    """Decode a sequence, with marks around what is trained, and control characters as text."""
    text, length = "", 0
    pairs = zip(sequence.tokens, sequence.weights, strict=True)
    for trained, run in groupby(pairs, lambda pair: pair[1] > 0):
        said = visible(chat.text([token for token, _ in run]))
        said = said[: LONGEST_ROW_SHOWN - length]
        length += len(said)
        text += f"{TRAINED_BEGIN}{said}{TRAINED_END}" if trained else said
        if length >= LONGEST_ROW_SHOWN:
            return f"{text} …"
    return text


def _count(split: str, tally: Tally, total: int, chat: Chat, lengths: Lengths) -> str:
    """Say what was counted of a split, a line each."""
    longest, number = tally.longest
    read = (
        f"{total:,}"
        if tally.read >= total
        else f"{tally.read:,} of {total:,}, in {SHOW_SECONDS:g} s"
    )
    context = chat.context
    lines = {
        "rows": read,
        **{what: f"{count:,}" for what, count in tally.counts.items() if count},
        "longest": f"{counted(longest, 'token')} (row {-number}); dataset.most_tokens is "
        f"{lengths.most_tokens:,}" + (f", and the model has read {context:,}" if context else ""),
    }
    width = max(map(len, lines)) + 2
    table = "\n".join(f"    {name:{width}}{value}" for name, value in lines.items())
    told = [f"    {why}" for why in tally.refused]
    return "\n".join([f"{split}", table, *told])
