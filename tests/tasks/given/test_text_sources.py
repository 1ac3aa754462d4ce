"""Several sources of texts: whose turn a draw is, and what each has of a batch and of a loss."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.given.given import (
    Drawing,
    choose_units,
    datums_of_given,
    draw_numbers,
    score_given,
    take_turns,
)
from ratchet.tasks.given.measures import read_measure
from ratchet.tasks.given.texts import TEXT_SCHEMA, Texts
from ratchet.tasks.settings.given import Batches
from ratchet.tasks.storage.tables import write_table

BATCH = Drawing(Batches(examples=8, normalisation="token"), 5, shares=(("chat", 3), ("code", 1)))


def row(source: str, number: int, split: str = "train") -> dict[str, object]:
    tokens = [number, 50, 60 if source == "chat" else 61]
    return {
        "split": split,
        "source": source,
        "example_id": number,
        "part": 0,
        "tokens": tokens,
        "weights": [0.0, 0.0, 1.0],
        "bytes": 1,
        "cut": False,
        "ends": True,
    }


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_in_any_number_of_draws_a_source_has_its_share_rounded(shares: list[int]) -> None:
    counts, total = [0] * len(shares), sum(shares)
    for draws, turn in enumerate(take_turns(tuple(shares)), 1):
        counts[turn] += 1
        assert all(
            abs(count * total - share * draws) < total
            for count, share in zip(counts, shares, strict=True)
        )
    assert counts == shares


def test_each_source_has_its_share_of_a_batch_in_passes_of_its_own() -> None:
    numbers = {"chat": [*range(9)], "code": [*range(100, 105)]}
    drawn = [one for step in range(15) for one in choose_units(numbers, BATCH, step)]
    for step in range(15):
        batch = drawn[8 * step : 8 * step + 8]
        assert Counter(source for source, _ in batch) == {"chat": 6, "code": 2}
    for source, known in numbers.items():
        own = [number for name, number in drawn if name == source]
        size = len(known)
        passes = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == known for one in passes)
        assert len({tuple(one) for one in passes}) == len(passes)


def test_a_small_share_waits_for_its_turn() -> None:
    batch = Drawing(
        Batches(examples=2, normalisation="token"), 0, shares=(("chat", 9), ("code", 1))
    )
    numbers = {"chat": [0, 1, 2], "code": [7]}
    steps = [choose_units(numbers, batch, step) for step in range(10)]
    assert [("code", 7) in step for step in steps].count(True) == 2


def test_one_source_is_drawn_as_if_there_were_no_shares() -> None:
    batch = Drawing(Batches(examples=4, normalisation="token"), 5)
    for step in range(7):
        chosen = choose_units({"": [*range(11)]}, batch, step)
        assert [number for _, number in chosen] == draw_numbers(
            range(11), 5, range(4 * step, 4 * step + 4)
        )


def test_datums_name_the_source_of_their_text(tmp_path: Path) -> None:
    rows = [row("chat", number) for number in range(6)] + [row("code", 0), row("code", 1)]
    table = pa.Table.from_pylist(rows, schema=TEXT_SCHEMA)
    datums = datums_of_given(Texts(write_table(table, tmp_path / "texts.parquet")), BATCH, 0)
    assert Counter(name.split("/")[0] for name in datums["rollout_id"].to_pylist()) == {
        "chat": 6,
        "code": 2,
    }
    for name, targets in zip(
        datums["group_id"].to_pylist(), datums["targets"].to_pylist(), strict=True
    ):
        assert targets[-1] == (60 if name.startswith("chat/") else 61)


class Halves:
    """Reference that gives a chat's tokens the probability 1/2, and those of code 1/4."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        return [
            np.log([0.5 if one[-1] == 60 else 0.25] * count).astype(np.float32)
            for one, count in zip(sequences, last, strict=True)
        ]


def test_a_held_out_loss_is_of_all_sources_and_of_each(tmp_path: Path) -> None:
    rows = [row("chat", 1, "test"), row("chat", 2, "test"), row("code", 1, "test")]
    texts = Texts(
        write_table(pa.Table.from_pylist(rows, schema=TEXT_SCHEMA), tmp_path / "texts.parquet")
    )
    score_given.make(tmp_path / "loss.json", texts, Halves(), 10, 0)
    found = read_measure(tmp_path / "loss.json")
    assert found.examples == 3
    assert found.value == pytest.approx(4 / 3 * np.log(2))
    of_source = {name: found.beside[f"loss/{name}"] for name in ("chat", "code")}
    assert of_source == pytest.approx({"chat": np.log(2), "code": 2 * np.log(2)})
