"""Pairs, units of two sides: rows → tokens → datums, and how a policy compares held-out pairs."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ratchet.adapters.calls import Message
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.judges import comparison
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rewards import BETTER
from ratchet.tasks.algorithm.preferences import (
    CHOSEN,
    MISMATCHED,
    PREFERENCES,
    REJECTED,
    SIDES,
    TRAINED_SIDES,
    PairTokens,
    compare_pairs,
    find_preference,
)
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.comparison.statistics import Z95, interval_of
from ratchet.tasks.datums import PAIR_DATUM_SCHEMA, given_datum
from ratchet.tasks.examples.reading import DatasetError, Example, Source
from ratchet.tasks.given.conversations import (
    Said,
    WeightedTokens,
    join_repeated,
    list_given,
    put_before,
    read_messages,
    read_tools,
    tokenize,
    tokenize_conversation,
)
from ratchet.tasks.given.given import (
    LEFT_OUT_LONG,
    Drawing,
    Given,
    GivenSource,
    Read,
    Unit,
    UnitRow,
    WrittenUnits,
    leaves_out,
)
from ratchet.tasks.given.measures import HeldOutMeasure, describe_counts
from ratchet.tasks.scoring import Reference, score_trained
from ratchet.tasks.settings.given import Lengths
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import is_written, read_json, remove_folder
from ratchet.tasks.storage.tables import arrays, read_table, write_table

PAIR_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("example_id", pa.int32()),
        ("side", pa.string()),
        # Number of the sequence, of a side whose tokens do not grow throughout.
        ("part", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        # Aligned with the tokens: 1 where a token is trained.
        ("mask", pa.list_(pa.int8())),
    ]
)

PAIR_KEYS = ["split", "example_id", "side", "part"]

REFERENCES = pa.schema(
    [*(PAIR_SCHEMA.field(name) for name in PAIR_KEYS), ("logprobs", pa.list_(pa.float32()))]
)
"""The rows of PAIR_SCHEMA with a value for each token, 0 where a token is not trained."""

SIDES_A_PART = 128
"""Sides that a reference scores before they are written."""

MOST_TOLD = 3
"""Broken rows of a split whose faults the log names; further ones are counted."""

log = logging.getLogger(__name__)


class WrittenPairs(WrittenUnits):
    """Pairs that are rows of a split."""

    def read(self, row: Mapping[str, Any], chat: Chat) -> Read:
        return read_pair(row, chat) or "ties"


class BoundPairs(Given):
    """The pairs of a run as tokens, with the reference's log-probabilities, read once.

    `loss` names the preference loss that they are compared by. A loss with a reference has
    `references`, their file; `from_start` is whether the reference is the policy's own start.
    """

    schema = PAIR_SCHEMA
    refuses_broken = False

    def __init__(
        self,
        path: Path,
        loss: tuple[str, Settings],
        references: Path | None = None,
        *,
        from_start: bool = False,
    ) -> None:
        super().__init__(path)
        self.loss, self._settings = loss
        self._references, self._from_start = references, from_start

    def is_bound(self) -> bool:
        return super().is_bound() and (self._references is None or is_written(self._references))

    @cached_property
    def scored(self) -> pa.Table:
        if self._references is None:
            lists = [np.zeros(len(one), np.float32) for one in arrays(self.table["mask"])]
            return self.table.append_column("references", pa.array(lists, pa.list_(pa.float32())))
        return self.table.append_column("references", read_table(self._references)["logprobs"])

    @property
    def drawn(self) -> pa.Schema:
        return PAIR_DATUM_SCHEMA

    def kept(
        self, source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
    ) -> Iterator[tuple[int, Unit]]:
        """Yield the pairs that can be compared, each with all its sides."""
        for number, unit in source.units(chat):
            if isinstance(unit, DatasetError):
                if counts["left out: broken"] < MOST_TOLD:
                    log.warning("left out: %s", unit)
                unit = "broken"
            if isinstance(unit, str):
                counts["pairs"] += 1
                counts[f"left out: {unit}"] += 1
                continue
            counts["labelled answers" if unit.labelled else "pairs"] += 1
            longest = max((len(one.tokens) for one in unit.sequences()), default=0)
            if leaves_out(lengths, longest, f"pair {number} of {source.name} has a side of"):
                counts[LEFT_OUT_LONG] += 1
                continue
            sides = {side: _cut(own, lengths.most_tokens) for side, own in unit.sides.items()}
            kept = Unit({side: own for side, own in sides.items() if own}, unit.labelled)
            if len(kept.sides) < 2 - kept.labelled:
                counts["left out: a side without a trained token"] += 1
            elif not kept.labelled and kept.sides[CHOSEN] == kept.sides[REJECTED]:
                counts["left out: identical sides"] += 1
            else:
                counts["cut"] += longest > lengths.most_tokens
                counts["sides without their end"] += sum(
                    side[-1].tokens[-1] not in chat.stop_tokens for side in kept.sides.values()
                )
                counts["tokens"] += sum(len(one.tokens) for one in kept.sequences())
                counts["trained tokens"] += sum(len(one.trained()) for one in kept.sequences())
                yield number, kept

    def keep(
        self, name: str, source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
    ) -> list[UnitRow]:
        """Return the rows of the pairs of a split; a pair is left out with all its sides.

        If the loss reads mismatched sides, each pair has a third one: its prompt with the answers
        to the next other prompt, one for each of its own.
        """
        row, kept = find_preference(self.loss), list[tuple[int, Unit]]()
        for number, unit in self.kept(source, chat, lengths, counts):
            if unit.labelled and not row.labelled:
                able = " or ".join(name for name, one in PREFERENCES.items() if one.labelled)
                raise DatasetError(
                    f"row {number} of {source.name} is a labelled answer, and preference.loss "
                    f"{self.loss} compares two; give preference.loss {able}, or rows of chosen and "
                    "rejected"
                )
            kept.append((number, unit))
        if not kept:
            raise DatasetError(
                f"{source.name} has 0 pairs that can be compared ({describe_counts(counts)}); give "
                "1 or more"
            )
        rows = [
            _row(name, number, side, part, sequence)
            for number, unit in kept
            for side, sequences in unit.sides.items()
            for part, sequence in enumerate(sequences)
        ]
        if row.mismatched:
            rows += _mismatched_rows(name, kept, lengths.most_tokens)
        return rows

    def datums(self, units: Sequence[Sequence[UnitRow]], drawing: Drawing) -> Iterator[UnitRow]:
        """Yield the sides of each pair, one after the other."""
        for pair, unit in enumerate(units):
            for row in unit:
                number, tokens = row["example_id"], row["tokens"]
                yield {
                    **given_datum(f"{number}.{row['side']}.{row['part']}", f"{number}", tokens),
                    "advantages": np.zeros(len(tokens) - 1, np.float32),
                    "mask": row["mask"][1:],
                    "scale": 1.0,
                    "pair": pair,
                    "side": SIDES.index(row["side"]),
                    "references": row["references"][1:],
                }

    def compare(self, rows: pa.Table, policy: Reference) -> HeldOutMeasure:
        """Measure how a policy compares pairs.

        `accuracy` is the share of pairs whose chosen side has the higher score of the loss (its log
        p, less the reference's if the loss has one); equal scores count half. A labelled answer is
        compared with the loss's z, or 0. The standard error belongs to a normal interval as wide as
        the share's own interval (`interval_of`). `margin` and `loss` are means.
        """
        masks = [mask.astype(np.float64) for mask in arrays(rows["mask"])]
        scored = score_trained(policy, arrays(rows["tokens"]), masks)
        sides = np.array([SIDES.index(side) for side in rows["side"].to_pylist()])
        references = [one.astype(np.float64) for one in arrays(rows["references"])]
        tokens = PairTokens(rows["example_id"].to_numpy(), sides, references, masks)
        losses, margins = compare_pairs(find_preference(self.loss), self._settings, tokens, scored)
        wins = np.where(margins == 0, 0.5, margins > 0)
        interval = interval_of(wins.tolist())
        return HeldOutMeasure(
            measure="accuracy",
            examples=len(wins),
            tokens=int(sum(masks[at].sum() for at in np.flatnonzero(sides < TRAINED_SIDES))),
            value=float(wins.mean()),
            standard_error=None if interval is None else (interval[1] - interval[0]) / (2 * Z95),
            interval=interval,
            beside={"margin": float(margins.mean()), "loss": float(losses.mean())},
            by_example=tuple((won, 1.0) for won in wins.tolist()),
        )

    def check_first(self, update: Path, tolerance: float | None) -> None:
        """Refuse (UserError) a first update whose policy is not the reference at its start.

        The service then trains and samples in different precisions, or by different texts.
        """
        if not self._from_start or tolerance is None or self._references is None:
            return
        apart = read_json(update)["reference/apart"]
        if not apart <= tolerance:
            raise UserError(
                f"the log-probabilities of the untrained policy are up to {apart:.3g} off those of "
                "the reference, which has the same weights; checkpoints.probe_tolerance allows "
                f"{tolerance:g}: the service trains in another precision than it samples. Give a "
                "larger checkpoints.probe_tolerance, if pairs may be compared that roughly"
            )


@durable
def score_references(path: Path, pairs: Path, reference: Reference, parts: Path) -> None:
    """Write the reference's log-probabilities of the trained tokens of every side.

    A part of SIDES_A_PART sides is first a file of the folder `parts`; the file is named after
    its rows. DatasetError names a pair with a token that the reference can never sample.
    """
    table, scored = read_table(pairs), list[pa.Table]()
    for first in range(0, table.num_rows, SIDES_A_PART):
        rows = table.slice(first, SIDES_A_PART)
        part = parts / f"{first:07d}-{first + rows.num_rows:07d}.parquet"
        if not is_written(part):
            write_table(_score(rows, reference), part)
            log.info("the reference has scored %d of %d sides", first + len(rows), len(table))
        scored.append(read_table(part))
    write_table(pa.concat_tables(scored), path)
    remove_folder(parts)


def _score(rows: pa.Table, reference: Reference) -> pa.Table:
    """Return the reference's log-probabilities of some sides, in REFERENCES."""
    scored = score_trained(reference, arrays(rows["tokens"]), arrays(rows["mask"]))
    for number, values in zip(rows["example_id"].to_pylist(), scored, strict=True):
        if not np.isfinite(values).all():
            raise DatasetError(
                f"the reference gives a token of pair {number} no finite log-probability; leave "
                "that pair out, or give another preference.reference"
            )
    lists = pa.array(scored, REFERENCES.field("logprobs").type)
    return rows.select(PAIR_KEYS).append_column("logprobs", lists).cast(REFERENCES)


def _cut(side: Sequence[WeightedTokens], most: int) -> list[WeightedTokens]:
    """Cut the sequences of a side, and drop a sequence that has no trained token left."""
    cut = [one.cut(most) for one in side]
    return [one for one in cut if any(one.weights)]


def _mismatched_rows(split: str, kept: Sequence[tuple[int, Unit]], most: int) -> Iterator[UnitRow]:
    """Yield each prompt with answers to the next other one; DatasetError if all are the same.

    A prompt of a pair gets two answers, the next pair's chosen and rejected one, so that good and
    bad answers count alike. A prompt of a labelled answer gets one answer.
    """
    split_at = [
        {name: _split_at_answer(side[0]) for name, side in unit.sides.items()} for _, unit in kept
    ]
    prompts = [next(iter(sides.values()))[0] for sides in split_at]
    if all(prompt == prompts[0] for prompt in prompts):
        raise DatasetError(
            f"the pairs of the split {split} have one prompt, and this loss compares its answers "
            "with those to others; give pairs of 2 prompts or more"
        )
    for place, ((number, unit), prompt) in enumerate(zip(kept, prompts, strict=True)):
        following = chain(range(place, len(kept)), range(place))
        others = split_at[next(at for at in following if prompts[at] != prompt)]
        for part, name in enumerate(unit.sides):
            _, answer = others.get(name) or next(iter(others.values()))
            tokens = [*prompt.tokens, *answer.tokens][:most]
            weights = [*prompt.weights, *answer.weights][:most]
            yield _row(split, number, MISMATCHED, part, WeightedTokens(tokens, weights))


def _split_at_answer(sequence: WeightedTokens) -> tuple[WeightedTokens, WeightedTokens]:
    """Split a sequence before its first trained token."""
    first = next(at for at, weight in enumerate(sequence.weights) if weight)
    prompt, answer = (
        WeightedTokens(sequence.tokens[own], sequence.weights[own])
        for own in (slice(first), slice(first, None))
    )
    return prompt, answer


def _row(split: str, number: int, side: str, part: int, sequence: WeightedTokens) -> UnitRow:
    return {
        "split": split,
        "example_id": number,
        "side": side,
        "part": part,
        "tokens": np.array(sequence.tokens, np.int32),
        "mask": (np.array(sequence.weights) > 0).astype(np.int8),
    }


PAIR_FORMS = (
    "prompt, chosen and rejected; or chosen and rejected; or comparison and label; or prompt, "
    "completion and label"
)
TIE = "Tie"

LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels of an answer as CSV has them, in small letters."""

Messages = Sequence[Said]
Sides = tuple[Messages, tuple[Messages, ...]]
"""A prompt, and what follows it on the chosen side and on the rejected one."""


def read_pair(row: Mapping[str, Any], chat: Chat) -> Unit | None:
    """Tokenize a row; None if it is a tie. DatasetError says what is wrong with a row.

    A row has `prompt`, `chosen` and `rejected`, each a text or a list of messages; or `chosen` and
    `rejected` alone, two conversations that begin alike, as messages or as transcripts; or, as the
    Tinker cookbook writes them, a `comparison` of `completion_A` with `completion_B` after a
    `prompt_conversation`, and a `label`. A labelled answer has a `prompt`, its `completion`, and a
    `label` that is true if it is good. The answers of a side, after the prompt, are trained.
    """
    if row.get("comparison") is None and row.get("completion") is not None and "label" in row:
        return _read_labelled(row, chat)
    read = read_sides(row)
    if read is None:
        return None
    prompt, sides = read
    own = (_tokenize(prompt, side, row.get("tools"), chat) for side in sides)
    return pair_of(*own)


def pair_of(
    chosen: list[WeightedTokens], rejected: list[WeightedTokens], *, labelled: bool = False
) -> Unit:
    """Make a pair of the sides that have a sequence."""
    sides = {CHOSEN: chosen, REJECTED: rejected}
    return Unit({side: own for side, own in sides.items() if own}, labelled)


def read_sides(row: Mapping[str, Any]) -> Sides | None:
    """Read the prompt of a comparison, its chosen side and its rejected one; None for a tie.

    A prompt that the sides repeat stands once.
    """
    if row.get("comparison") is not None:
        read = _read_comparison(row["comparison"], row.get("label"))
    elif row.get("chosen") is None or row.get("rejected") is None:
        raise DatasetError(f"it has {list_given(row)}; give {PAIR_FORMS}")
    else:
        read = _read_sides(row)
    if read is None:
        return None
    prompt, sides = read
    (asked, chosen), (other, rejected) = (join_repeated(prompt, side) for side in sides)
    if asked != other:
        raise DatasetError("one side begins otherwise than the prompt; let both begin with it")
    return put_before(row, asked), (chosen, rejected)


def _read_labelled(row: Mapping[str, Any], chat: Chat) -> Unit:
    good = LABELS.get(str(row["label"]).strip().lower())
    if good is None:
        raise DatasetError(f"its label is {row['label']!r:.80}; give true or false")
    prompt, answer = join_repeated(
        read_messages(row.get("prompt"), "prompt", "user"),
        read_messages(row["completion"], "completion", "assistant"),
    )
    own = _tokenize(put_before(row, prompt), answer, row.get("tools"), chat)
    return Unit({CHOSEN if good else REJECTED: own}, labelled=True)


def _read_comparison(comparison: Any, label: Any) -> Sides | None:
    if not isinstance(comparison, Mapping):
        raise DatasetError(f"its comparison is {comparison!r:.80}; give an object")
    if label not in ("A", "B", TIE):
        raise DatasetError(f"its label is {label!r:.80}; give A, B or {TIE}")
    prompt = read_messages(comparison.get("prompt_conversation"), "prompt_conversation", "user")
    names = ("completion_A", "completion_B") if label == "A" else ("completion_B", "completion_A")
    sides = tuple(read_messages(comparison.get(name), name, "assistant") for name in names)
    return None if label == TIE else (prompt, sides)


def _read_sides(row: Mapping[str, Any]) -> Sides:
    sides = tuple(read_messages(row[name], name, "assistant") for name in (CHOSEN, REJECTED))
    if row.get("prompt") is not None:
        return read_messages(row["prompt"], "prompt", "user"), sides
    chosen, rejected = sides
    alike = [one == other for one, other in zip(chosen[:-1], rejected[:-1], strict=False)]
    common = [*alike, False].index(False)
    if not common:
        raise DatasetError("its two sides begin with no common message; give a prompt")
    return chosen[:common], (chosen[common:], rejected[common:])


def _tokenize(prompt: Messages, side: Messages, tools: Any, chat: Chat) -> list[WeightedTokens]:
    """Tokenize a side behind its prompt; its own answers are trained, and nothing else."""
    if not side:
        raise DatasetError("a side repeats its prompt and has no answer; give one")
    said = [
        *(replace(one, trainable=False) for one in prompt),
        *(replace(one, trainable=one.message["role"] == "assistant") for one in side),
    ]
    found = tokenize_conversation(said, read_tools(tools), chat, "marked")
    return [sequence for sequence in found if any(sequence.weights)]


@dataclass(frozen=True)
class ComparedPairs(WrittenUnits):
    """Texts of the pairs of a split: each pair is compared in both orders; a tie makes no text."""

    question: str

    def read(self, row: Mapping[str, Any], chat: Chat) -> Unit:
        if (read := read_sides(row)) is None:
            return Unit({})
        chosen, rejected = ({"messages": messages} for messages in _conversations(read))
        found: list[WeightedTokens] = []
        for verdict, shown in (("A", (chosen, rejected)), ("B", (rejected, chosen))):
            asked = {"role": "user", "content": comparison(self.question, *shown)}
            answer = {"role": "assistant", "content": verdict}
            found += tokenize({"messages": [asked, answer]}, chat, "assistant")
        return Unit({"": found})


@dataclass(frozen=True)
class ComparedExamples(Source):
    """Examples of a judge: the two sides of each pair, with BETTER; a tie makes no example."""

    question: str = ""

    def examples(self) -> list[Example]:
        return [
            {**row, "example": {"rollouts": sides, "question": self.question, BETTER: CHOSEN}}
            for row in super().examples()
            if (sides := self._sides(row)) is not None
        ]

    def _sides(self, row: Example) -> list[dict[str, Any]] | None:
        """Return a pair as a judge is shown it; in every other pair the better side is second."""
        try:
            read = read_sides(row["example"])
        except DatasetError as error:
            raise DatasetError(f"row {row['example_id']} of {self.dataset}: {error}") from error
        if read is None:
            return None
        named = zip((CHOSEN, REJECTED), _conversations(read), strict=True)
        sides = [{"id": name, "messages": messages} for name, messages in named]
        return sides if row["example_id"] % 2 else sides[::-1]


def _conversations(read: Sides) -> list[list[Message]]:
    prompt, sides = read
    return [[one.message for one in (*prompt, *side)] for side in sides]
