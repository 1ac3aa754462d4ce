"""Texts, units of one side: rows → tokens → datums, and a policy's loss on held-out texts.

A teacher reads the texts once; its likeliest tokens are a file for each part of them.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, sqrt
from math import log as natural
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa

from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.algorithm.distillation import NO_TOKEN, find_distillation
from ratchet.tasks.comparison.statistics import Z95
from ratchet.tasks.datums import TAUGHT_DATUM_SCHEMA, given_datum
from ratchet.tasks.examples.reading import DatasetError, fill_reads
from ratchet.tasks.given.conversations import WeightedTokens, tokenize
from ratchet.tasks.given.given import (
    LEFT_OUT_LONG,
    Drawing,
    Given,
    GivenSource,
    Unit,
    UnitRow,
    WrittenUnits,
    leaves_out,
)
from ratchet.tasks.given.measures import COUNTS_KEY, HeldOutMeasure, describe_counts
from ratchet.tasks.recording.step_log import Metrics
from ratchet.tasks.scoring import LikeliestScorer, Reference, count_from_first, score_tokens
from ratchet.tasks.settings.given import ALONE, TRAIN, Batches, Lengths, TextBatches, Trained
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.tables import arrays, read_table, write_table

if TYPE_CHECKING:
    from ratchet.adapters.tinker.service import PatientSampler

TEXT_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        # Name of the source, if the texts are of several.
        ("source", pa.string()),
        ("example_id", pa.int32()),
        # Number of the sequence, of an example whose tokens do not grow throughout.
        ("part", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        # Aligned with the tokens: the weight of each in the loss, 0 where it is not trained.
        ("weights", pa.list_(pa.float32())),
        # Bytes of text in UTF-8 that the trained tokens write.
        ("bytes", pa.int32()),
        ("cut", pa.bool_()),
        # Whether the last trained token is one at which an answer stops.
        ("ends", pa.bool_()),
    ],
    {COUNTS_KEY: b"{}"},
)
TEXT_KEYS = ["split", "source", "example_id", "part"]
"""Columns that name a sequence."""

TAUGHT = pa.schema(
    [
        *(TEXT_SCHEMA.field(name) for name in TEXT_KEYS),
        # How many tokens the teacher has read.
        ("read", pa.int32()),
        # The teacher's likeliest tokens at each trained place, equally many of each in turn.
        ("top_tokens", pa.list_(pa.int32())),
        ("top_logprobs", pa.list_(pa.float32())),
    ]
)
"""A teacher's likeliest tokens in texts, a row for each sequence."""

ROWS_A_PART = 256
"""Sequences that a file of TAUGHT has."""

LIKELIEST = (("top_tokens", 0), ("top_logprobs", NO_TOKEN))
"""A teacher's columns, with their values where no token is trained."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenTexts(WrittenUnits):
    """Texts in rows; `reads` is what a teacher reads before each conversation."""

    trained: Trained = "assistant"
    reads: str | None = None

    def read(self, row: Mapping[str, Any], chat: Chat) -> Unit:
        before = None if self.reads is None else fill_reads(self.reads, row)
        return Unit({"": tokenize(row, chat, self.trained, before)})


class Texts(Given):
    """The texts of a run as tokens, with what its teacher finds likeliest, read once.

    `taught` names a teacher's file by the number of its part. The `divergence` is its loss.
    """

    schema = TEXT_SCHEMA
    refuses_broken = True

    def __init__(
        self, path: Path, taught: Callable[[int], Path] | None = None, divergence: str | None = None
    ) -> None:
        super().__init__(path)
        self._taught, self._divergence = taught, divergence

    def is_bound(self) -> bool:
        return super().is_bound() and (self._taught is None or all(map(is_written, self.parts())))

    def parts(self) -> list[Path]:
        """List the teacher's files that the texts need."""
        assert self._taught is not None, "the texts have a teacher"
        return [*map(self._taught, range(ceil(self.table.num_rows / ROWS_A_PART)))]

    def of_part(self, part: int) -> pa.Table:
        """Return the rows of a part in TEXT_SCHEMA."""
        return self.table.slice(part * ROWS_A_PART, ROWS_A_PART)

    @cached_property
    def scored(self) -> pa.Table:
        if self._taught is None:
            return self.table
        table, taught = self.table, pa.concat_tables(map(read_table, self.parts()))
        if table.select(TEXT_KEYS).to_pylist() != taught.select(TEXT_KEYS).to_pylist():
            raise ValueError(
                f"the teacher's files of {self.path} belong to other texts; remove them, and "
                "they are made again"
            )
        for name in TAUGHT.names[len(TEXT_KEYS) :]:
            table = table.append_column(name, taught[name])
        return table

    @property
    def drawn(self) -> pa.Schema:
        return super().drawn if self._taught is None else TAUGHT_DATUM_SCHEMA

    def names(self, rows: pa.Table) -> list[tuple[str, int]]:
        return [*zip(*(rows[name].to_pylist() for name in TEXT_KEYS[1:3]), strict=True)]

    def kept(
        self, source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
    ) -> Iterator[tuple[int, Unit]]:
        """Yield the sequences that train something, each as a unit."""
        for row in trained_rows(source, chat, lengths, counts):
            one = WeightedTokens(row["tokens"].tolist(), row["weights"].tolist())
            yield row["example_id"], Unit({"": [one]})

    def keep(
        self, name: str, source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
    ) -> list[UnitRow]:
        split, _, part = name.partition("/")
        own = [*trained_rows(source, chat, lengths, counts)]
        if not own:
            raise DatasetError(
                f"nothing is trained in {source.name}: {describe_counts(counts)}; see "
                "dataset.trained and dataset.too_long"
            )
        return [{"split": split, "source": part, **row} for row in own]

    def count_repeated(
        self, rows: Mapping[str, Sequence[UnitRow]], counts: Mapping[str, Counter[str]]
    ) -> None:
        trained = {
            row["tokens"].tobytes() for of in rows.values() for row in of if row["split"] == TRAIN
        }
        for name, held_out in rows.items():
            if name.partition("/")[0] == TRAIN:
                continue
            repeated = sum(row["tokens"].tobytes() in trained for row in held_out)
            counts[name]["sequences that are trained as well"] = repeated
            if repeated:
                log.warning(
                    "%s: %d of %d held-out sequences are trained as well, token for token, so that "
                    "their loss says nothing of new texts",
                    name,
                    repeated,
                    len(held_out),
                )

    def datums(self, units: Sequence[Sequence[UnitRow]], drawing: Drawing) -> Iterator[UnitRow]:
        assert isinstance(drawing.batch, TextBatches)
        for unit, scale in zip(units, _scales(units, drawing.batch), strict=True):
            for row in unit:
                yield _datum(row, scale)

    def measure(self, datums: Path) -> Metrics:
        """Measure the texts of a step: how many they are, and how many sequences were cut.

        `texts/ends` is the share of the sequences whose last trained token is a stop token of
        answers: a model that is trained on other sequences does not learn to stop.
        """
        drawn = read_table(datums, ["rollout_id", "group_id"])
        sequences = [self._ends[name] for name in drawn["rollout_id"].to_pylist()]
        return {
            "texts": len({*drawn["group_id"].to_pylist()}),
            "texts/cut": sum(cut for cut, _ in sequences),
            "texts/ends": fmean(ends for _, ends in sequences),
        }

    @cached_property
    def _ends(self) -> Mapping[str, tuple[bool, bool]]:
        """Whether each trained sequence was cut, and whether it ends as an answer does, by name."""
        rows = self.of_split(TRAIN).select([*TEXT_KEYS, "cut", "ends"]).to_pylist()
        return {name_sequence(row): (row["cut"], row["ends"]) for row in rows}

    def compare(self, rows: pa.Table, policy: Reference) -> HeldOutMeasure:
        """Measure the loss of a policy, in nats a token by the weights of the trained tokens.

        With a teacher it is the divergence from the teacher. Otherwise `bits_per_byte` is the loss
        of the trained tokens over the bytes that they write: it compares any models.
        """
        weights = arrays(rows["weights"])
        last = count_from_first(weights)
        if self._divergence is not None:
            losses = _diverge(cast("PatientSampler", policy), rows, last, self._divergence)
        else:
            scored = score_tokens(policy.score, arrays(rows["tokens"]), last)
            losses = [-log_p for log_p in scored]
        lost = [SequenceLoss.of(*one) for one in zip(losses, weights, strict=True)]
        beside: dict[str, float] = {}
        if self._divergence is None:
            bits = sum(one.nats for one in lost) / natural(2)
            beside["bits_per_byte"] = bits / max(1, sum(rows["bytes"].to_pylist()))
        return measure_loss(self.names(rows), lost, beside)


def measure_loss(
    names: Sequence[tuple[str, int]], lost: "Sequence[SequenceLoss]", beside: Mapping[str, float]
) -> HeldOutMeasure:
    """Measure the loss over sequences, whose texts have names: a source and a number there.

    The standard error is for a ratio of two means over examples, since tokens of one text are not
    independent (Cochran 1977, 6.4).
    """
    sources: dict[str, dict[int, list[SequenceLoss]]] = defaultdict(lambda: defaultdict(list))
    for (source, number), one in zip(names, lost, strict=True):
        sources[source][number].append(one)
    of_source = {source: [*examples.values()] for source, examples in sources.items()}
    examples = [example for of_one in of_source.values() for example in of_one]
    loss, error = _estimate(examples)
    named = {source: _estimate(of_one)[0] for source, of_one in of_source.items() if source}
    return HeldOutMeasure(
        measure="loss",
        examples=len(examples),
        tokens=sum(one.tokens for one in lost),
        value=loss,
        standard_error=error,
        interval=None if error is None else (loss - Z95 * error, loss + Z95 * error),
        beside={**beside, **{f"loss/{source}": loss for source, loss in named.items()}},
        by_example=tuple(map(_sum, examples)),
    )


@dataclass(frozen=True)
class SequenceLoss:
    """Loss of a sequence over its trained tokens: its nats, also weighted, and the weights' sum."""

    nats: float
    weighted: float
    weight: float
    tokens: int

    @classmethod
    def of(cls, losses: np.ndarray, weights: np.ndarray) -> Self:
        own = weights[-len(losses) :].astype(np.float64)
        trained = own > 0
        lost = losses.astype(np.float64)[trained]
        weighted = float(own[trained] @ lost)
        return cls(float(lost.sum()), weighted, float(own.sum()), int(trained.sum()))


def _sum(example: Sequence[SequenceLoss]) -> tuple[float, float]:
    """Sum the weighted loss of an example's sequences, and the weights."""
    return sum(one.weighted for one in example), sum(one.weight for one in example)


def _estimate(examples: Sequence[Sequence[SequenceLoss]]) -> tuple[float, float | None]:
    sums, weights = np.array([_sum(own) for own in examples]).T
    loss, count = float(sums.sum() / weights.sum()), len(examples)
    if count < 2:
        return loss, None
    residuals = sums - loss * weights
    spread = count / (count - 1) * float(residuals @ residuals)
    return loss, sqrt(spread) / float(weights.sum())


class LongerTexts:
    """Texts for a teacher that reads more than the policy: the same texts, but longer."""

    def __init__(self, sources: Mapping[str, GivenSource], chat: Chat) -> None:
        self._sources, self._chat = sources, chat

    def tokens(self, row: Mapping[str, Any], ending: Sequence[int]) -> np.ndarray:
        """Return the tokens of a row, with its `ending`, its tokens from the first trained one on.

        DatasetError if the renderer writes these otherwise behind what the teacher reads.
        """
        longer = self._sequences.get(tuple(row[name] for name in TEXT_KEYS))
        if longer is not None:
            first = next(at for at, weight in enumerate(longer.weights) if weight > 0)
            end = first + len(ending)
            if longer.tokens[first:end] == [*ending]:
                return np.array(longer.tokens[:end])
        raise DatasetError(
            f"the renderer {self._chat.renderer} writes text {row['example_id']} otherwise behind "
            "what its teacher reads; leave teacher.reads out, or give another model.renderer"
        )

    @cached_property
    def _sequences(self) -> Mapping[tuple[Any, ...], WeightedTokens]:
        found: dict[tuple[Any, ...], WeightedTokens] = {}
        for name, source in self._sources.items():
            for number, unit in source.units(self._chat):
                if isinstance(unit, DatasetError):
                    raise unit
                sequences = unit.sequences() if isinstance(unit, Unit) else ()
                for part, sequence in enumerate(sequences):
                    found[*name.partition("/")[::2], number, part] = sequence
        return found


def ask_teacher(
    texts: Texts, teacher: LikeliestScorer, k: int, longer: LongerTexts | None = None
) -> None:
    """Write a teacher's likeliest tokens in the texts, a file a part, unless it is there."""
    for part in range(len(texts.parts())):
        score_part(texts.parts()[part], texts, part, teacher, k, longer)
    taught = texts.of_split(TRAIN)
    covered = np.exp(np.concatenate(arrays(taught["top_logprobs"])), dtype=np.float64).reshape(
        -1, k
    )
    log.info(
        "the teacher has read %d tokens to train; its %d likeliest cover %.4f at %d places",
        sum(taught["read"].to_pylist()),
        k,
        covered.sum(1).mean(),
        len(covered),
    )


@durable
def score_part(
    path: Path,
    texts: Texts,
    part: int,
    teacher: LikeliestScorer,
    k: int,
    longer: LongerTexts | None,
) -> None:
    """Write a teacher's k likeliest tokens at the trained places of a part of the texts.

    DatasetError names a text with a place for which the teacher gives no token.
    """
    rows = texts.of_part(part)
    keys = rows.select(TEXT_KEYS).to_pylist()
    own = arrays(rows["tokens"])
    trained = [weights > 0 for weights in arrays(rows["weights"])]
    last = count_from_first(trained)
    if longer is not None:
        pairs = zip(keys, own, last, strict=True)
        own = [longer.tokens(key, tokens[-count:].tolist()) for key, tokens, count in pairs]
    made = []
    scored = score_tokens(partial(teacher.score_likeliest, k=k), own, last)
    for key, tokens, mask, (top, logprobs) in zip(keys, own, trained, scored, strict=True):
        kept = mask[-len(top) :]
        found = np.where(np.isfinite(logprobs), logprobs, NO_TOKEN)[kept]
        if not (found > NO_TOKEN).any(1).all():
            raise DatasetError(
                f"the teacher gives no likely token at a trained place of text "
                f"{key['example_id']}; leave that text out, or give another teacher.model"
            )
        lists = {"top_tokens": top[kept].ravel(), "top_logprobs": found.ravel()}
        made.append({**key, "read": len(tokens), **lists})
    write_table(pa.Table.from_pylist(made, schema=TAUGHT), path)


def name_sequence(row: Mapping[str, Any]) -> str:
    return f"{name_text(row)}.{row['part']}"


def name_text(row: Mapping[str, Any]) -> str:
    source = row["source"]
    return f"{row['example_id']}" if source == ALONE else f"{source}/{row['example_id']}"


def trained_rows(
    source: GivenSource, chat: Chat, lengths: Lengths, counts: Counter[str]
) -> Iterator[UnitRow]:
    """Yield the sequences that train something, as rows without their split."""
    most = lengths.most_tokens
    for number, unit in source.units(chat):
        if isinstance(unit, DatasetError):
            raise unit
        assert isinstance(unit, Unit), "a text is left out by its sequences"
        counts["texts"] += 1
        for part, whole in enumerate(unit.sequences()):
            length = len(whole.tokens)
            if leaves_out(lengths, length, f"row {number} of {source.name} has"):
                counts[LEFT_OUT_LONG] += 1
                continue
            kept = whole.cut(most)
            trained = kept.trained()
            ends = {*trained[-1:]} & {*chat.stop_tokens} != set()
            counts["tokens"] += len(kept.tokens)
            counts["trained tokens"] += len(trained)
            counts["sequences that end as answers do"] += ends
            counts["cut"] += length > most
            if whole.thoughts_left_out:
                counts["earlier answers without their reasoning"] += whole.thoughts_left_out
            if whole.unanswered:
                counts["messages behind the last answer left out"] += whole.unanswered
            counts["cut before their end"] += any(whole.weights[most:])
            counts["without a trained token"] += trained == []
            if trained:
                counts["sequences"] += 1
                written = chat.text([token for token in trained if token not in chat.stop_tokens])
                yield {
                    "example_id": number,
                    "part": part,
                    "tokens": np.array(kept.tokens, np.int32),
                    "weights": np.array(kept.weights, np.float32),
                    "bytes": len(written.encode()),
                    "cut": length > most,
                    "ends": ends,
                }


def _scales(units: Sequence[Sequence[UnitRow]], batch: TextBatches) -> list[float]:
    """Return the factor of each text's loss."""
    weights = [float(sum(row["weights"].sum(dtype=np.float64) for row in unit)) for unit in units]
    match batch:
        case Batches(normalisation="example"):
            return [1 / (weight * len(weights)) for weight in weights]
        case Batches(normalisation="fixed", divisor=float(divisor)):
            return [1 / divisor] * len(weights)
        case _:
            return [1 / sum(weights)] * len(weights)


def _datum(row: UnitRow, scale: float) -> UnitRow:
    weights = row["weights"][1:]
    trained = weights > 0
    return {
        **given_datum(name_sequence(row), name_text(row), row["tokens"]),
        "advantages": weights,
        "mask": trained.astype(np.int8),
        "scale": scale,
        **{
            name: spread_cells(row[name], trained, empty).ravel()
            for name, empty in LIKELIEST
            if name in row
        },
    }


def spread_cells(cells: np.ndarray, trained: np.ndarray, empty: float) -> np.ndarray:
    """Spread the k cells of each trained place over all places: [places, k]."""
    of_trained = cells.reshape(int(trained.sum()), -1)
    spread = np.full((len(trained), of_trained.shape[1]), empty, cells.dtype)
    spread[trained] = of_trained
    return spread


def _diverge(
    policy: "PatientSampler", table: pa.Table, last: Sequence[int], divergence: str
) -> list[np.ndarray]:
    """Return the divergence from the teacher from the first trained token of each sequence on."""
    trained = [one[-count:] > 0 for one, count in zip(arrays(table["weights"]), last, strict=True)]
    likeliest, log_q = (
        [spread_cells(*one, empty) for one in zip(arrays(table[name]), trained, strict=True)]
        for name, empty in LIKELIEST
    )
    chosen = [np.where(q > NO_TOKEN, top, -1) for top, q in zip(likeliest, log_q, strict=True)]
    log_p = score_tokens(policy.score_chosen, arrays(table["tokens"]), chosen)
    function = find_distillation(divergence).function
    pairs = zip(log_p, log_q, strict=True)
    return [function(p.astype(np.float64), q.astype(np.float64))[0] for p, q in pairs]
