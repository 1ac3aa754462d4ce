"""texts → datums: the texts of a step, each token weighted by its share of the step's loss."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from adapters.calls import POLICY
from tasks.algorithm.distillation import NONE
from tasks.datums import OF_TAUGHT, SCHEMA, given_datum
from tasks.examples.curricula import shuffle_pass
from tasks.recording.step_log import Metrics
from tasks.recovery.recorded_steps import StepSource
from tasks.storage.durability import durable
from tasks.storage.files import is_written
from tasks.storage.manifest import Eras
from tasks.storage.tables import arrays, read, write
from tasks.texts.rules import ALONE, TRAIN, TextBatch
from tasks.texts.source import KEYS, Texts

T = TypeVar("T")


@durable
def draw_texts(path: Path, texts: Texts, batch: TextBatch, step: int) -> None:
    """Write the datums of a step: its examples, drawn in passes that the seed shuffles."""
    write(datums_of_texts(texts.of_split(TRAIN), batch, step), path)


def measure_texts(texts: Texts, datums: Path) -> Metrics:
    """Measure the texts of a step: how many they are, and how many of their sequences were cut.

    `texts/ends` is the share of the sequences whose last trained token is one at which answers
    stop: a model that is trained on others does not learn to stop.
    """
    drawn = read(datums, ["rollout_id", "group_id"])
    rows = texts.of_split(TRAIN).select([*KEYS, "cut", "ends"]).to_pylist()
    known = {name_sequence(row): row for row in rows}
    sequences = [known[name] for name in drawn["rollout_id"].to_pylist()]
    return {
        "texts": len({*drawn["group_id"].to_pylist()}),
        "texts/cut": sum(row["cut"] for row in sequences),
        "texts/ends": fmean(row["ends"] for row in sequences),
    }


def name_sequence(row: Mapping[str, Any]) -> str:
    """Return the name that a sequence has as a rollout of the datums."""
    return f"{name_text(row)}.{row['part']}"


def name_text(row: Mapping[str, Any]) -> str:
    """Return the name that a text has as a group of the datums."""
    source = row["source"]
    return f"{row['example_id']}" if source == ALONE else f"{source}/{row['example_id']}"


def datums_of_texts(texts: pa.Table, batch: TextBatch, step: int) -> pa.Table:
    """Return the datums of a step, a row for each sequence of its examples."""
    places: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    names = zip(texts["source"].to_pylist(), texts["example_id"].to_pylist(), strict=True)
    for place, (source, number) in enumerate(names):
        places[source][number].append(place)
    numbers = {source: [*of_source] for source, of_source in places.items()}
    chosen = [places[source][number] for source, number in choose_texts(numbers, batch, step)]
    taken = texts.take([place for sequences in chosen for place in sequences])
    taught = {"top_tokens", "top_logprobs"} & {*texts.column_names}
    lists = {name: arrays(taken[name]) for name in ("tokens", "weights", *taught)}
    rows = (
        {**row, **dict(zip(lists, values, strict=True))}
        for row, *values in zip(taken.select(KEYS).to_pylist(), *lists.values(), strict=True)
    )
    examples = [[next(rows) for _ in sequences] for sequences in chosen]
    return pa.Table.from_pylist(
        [
            _datum(row, scale)
            for sequences, scale in zip(examples, _scales(examples, batch), strict=True)
            for row in sequences
        ],
        schema=OF_TAUGHT if taught else SCHEMA,
    )


def choose_texts(
    numbers: Mapping[str, Sequence[int]], batch: TextBatch, step: int
) -> list[tuple[str, int]]:
    """Choose the examples of a step, each by its source and its number there.

    The sources take turns, and each is drawn in passes of its own.
    """
    turns = take_turns(tuple(share for _, share in batch.shares))
    places = range(step * batch.examples, (step + 1) * batch.examples)
    drawn: list[Iterator[int]] = []
    for at, (source, share) in enumerate(batch.shares):
        first, last = (
            place // len(turns) * share + turns[: place % len(turns)].count(at)
            for place in (places.start, places.stop)
        )
        seed = batch.seed if source == ALONE else f"{batch.seed}/{source}"
        drawn.append(iter(draw_numbers(numbers[source], seed, range(first, last))))
    taking = (turns[place % len(turns)] for place in places)
    return [(batch.shares[at][0], next(drawn[at])) for at in taking]


@lru_cache
def take_turns(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return whose turn each draw of a round is: each source has as many turns as its share.

    In the first n draws a source has its share of n, rounded up or down: its j-th turn falls into
    the window of its j-th part of the round, and of those whose window is open the one whose window
    closes first is taken (Baruah et al. 1996).
    """
    total, taken, turns = sum(shares), [0] * len(shares), list[int]()
    for place in range(total):
        closing = [
            (-(-(taken[at] + 1) * total // share), at)
            for at, share in enumerate(shares)
            if taken[at] * total // share <= place
        ]
        _, at = min(closing)
        taken[at] += 1
        turns.append(at)
    return tuple(turns)


def choose_numbers(numbers: Sequence[int], seed: int, step: int, count: int) -> list[int]:
    """Choose the examples of a step by their numbers, in passes that the seed shuffles."""
    return draw_numbers(numbers, seed, range(step * count, (step + 1) * count))


def draw_numbers(numbers: Sequence[int], seed: int | str, places: range) -> list[int]:
    """Return the numbers at some places of the endless series of passes over them."""
    drawn = [divmod(place, len(numbers)) for place in places]
    return [numbers[shuffle_pass(len(numbers), seed, turn)[at]] for turn, at in drawn]


def choose_first(names: Sequence[T], most: int, seed: int) -> set[T]:
    """Choose the first `most` examples in a seeded order, all if there are fewer."""
    known = [*dict.fromkeys(names)]
    drawn = draw_numbers(range(len(known)), seed, range(min(most, len(known))))
    return {known[at] for at in drawn}


def _scales(examples: Sequence[Sequence[dict[str, Any]]], batch: TextBatch) -> list[float]:
    """Return the factor of each example's loss."""
    weights = [
        float(sum(row["weights"].sum(dtype=np.float64) for row in example)) for example in examples
    ]
    match batch.normalisation:
        case "token":
            return [1 / sum(weights)] * len(weights)
        case "example":
            return [1 / (weight * len(weights)) for weight in weights]
        case "fixed":
            return [1 / (batch.divisor or 1.0)] * len(weights)


def _datum(row: dict[str, Any], scale: float) -> dict[str, Any]:
    weights = row["weights"][1:]
    trained = weights > 0
    return {
        **given_datum(name_sequence(row), name_text(row), row["tokens"]),
        "advantages": weights,
        "mask": trained.astype(np.int8),
        "scale": scale,
        **{
            name: spread_cells(row[name], trained, empty).ravel()
            for name, empty in (("top_tokens", 0), ("top_logprobs", NONE))
            if name in row
        },
    }


def spread_cells(cells: np.ndarray, trained: np.ndarray, empty: float) -> np.ndarray:
    """Spread the cells of trained places, equally many of each, over all places: [places, k]."""
    of_trained = cells.reshape(int(trained.sum()), -1)
    spread = np.full((len(trained), of_trained.shape[1]), empty, cells.dtype)
    spread[trained] = of_trained
    return spread


@dataclass(frozen=True)
class TextSteps(StepSource):
    """Source of the datums of the main policy that are texts, whose files `place` names."""

    texts: Path
    place: Callable[[str, int], Path]
    batches_of: Eras[TextBatch]
    taught: Callable[[int], Path] | None = None
    """Names the files of what a teacher finds likeliest in the texts, if they have one."""

    def restore(self, step: int) -> None:
        path = self.place(POLICY, step)
        if is_written(path) or not is_written(self.texts):
            return
        texts = Texts(self.texts, self.taught)
        if self.taught is None or all(map(is_written, texts.parts())):
            draw_texts.make(path, texts, self.batches_of.at(step), step)
