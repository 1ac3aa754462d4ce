from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ratchet.tasks.given.given import Drawing, datums_of_given, draw_numbers, score_given
from ratchet.tasks.given.measures import find_measured_gain, read_measure
from ratchet.tasks.given.texts import TEXT_SCHEMA, Texts
from ratchet.tasks.settings.given import Batches
from ratchet.tasks.storage.tables import arrays, write_table


def row(
    number: int, weights: list[float], split: str = "train", part: int = 0
) -> dict[str, object]:
    tokens = [10 * number + at for at in range(len(weights))]
    return {
        "split": split,
        "source": "",
        "example_id": number,
        "part": part,
        "tokens": tokens,
        "weights": weights,
        "bytes": len(weights),
        "cut": False,
        "ends": True,
    }


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    rows = [row(1, [0, 0, 1, 1]), row(2, [0, 2.0]), row(3, [0, 1, 1, 1]), row(3, [0, 0, 1], part=1)]
    table = pa.Table.from_pylist([*rows, row(4, [0, 1], "test")], schema=TEXT_SCHEMA)
    return Texts(write_table(table, tmp_path / "texts.parquet"))


def token_weights(datums: pa.Table) -> dict[str, list[float]]:
    """Map each sequence to the weights of its targets in the service's sum."""
    lists = arrays(datums["advantages"]), arrays(datums["mask"])
    scaled = zip(datums["rollout_id"].to_pylist(), *lists, datums["scale"].to_pylist(), strict=True)
    return {name: [*(mask * weights * scale)] for name, weights, mask, scale in scaled}


@pytest.mark.parametrize(
    ("batch", "weights"),
    [
        (
            Drawing(Batches(examples=3, normalisation="token"), 0),
            {"1.0": [0, 1 / 8, 1 / 8], "2.0": [2 / 8], "3.0": [1 / 8] * 3, "3.1": [0, 1 / 8]},
        ),
        (
            Drawing(Batches(examples=3, normalisation="example"), 0),
            {"1.0": [0, 1 / 6, 1 / 6], "2.0": [1 / 3], "3.0": [1 / 12] * 3, "3.1": [0, 1 / 12]},
        ),
        (
            Drawing(Batches(examples=3, normalisation="fixed", divisor=4), 0),
            {"1.0": [0, 1 / 4, 1 / 4], "2.0": [2 / 4], "3.0": [1 / 4] * 3, "3.1": [0, 1 / 4]},
        ),
    ],
)
def test_a_step_s_loss_is_divided_as_its_name_says(
    texts: Texts, batch: Drawing, weights: dict[str, list[float]]
) -> None:
    found = token_weights(datums_of_given(texts, batch, 0))
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        assert found[name] == pytest.approx(expected)


def test_each_token_predicts_the_next_one(texts: Texts) -> None:
    datums = datums_of_given(texts, Drawing(Batches(examples=3, normalisation="token"), 0), 0)
    rows = {one["rollout_id"]: one for one in datums.to_pylist()}
    assert (rows["1.0"]["tokens"], rows["1.0"]["targets"]) == ([10, 11, 12], [11, 12, 13])
    assert rows["1.0"]["mask"] == [0, 1, 1]
    assert {one["policy_version"] for one in rows.values()} == {None}


def test_a_later_step_looks_at_its_own_texts_alone(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = Drawing(Batches(examples=2, normalisation="token"), 0)
    drawn = write_table(datums_of_given(texts, drawing, 0), tmp_path / "0.parquet")
    measured = texts.measure(drawn)
    for whole in ("names", "of_split"):
        monkeypatch.setattr(texts, whole, None)
    assert datums_of_given(texts, drawing, 1).num_rows >= 2
    assert texts.measure(drawn) == measured


def test_passes_draw_every_text_once_in_a_new_order() -> None:
    numbers = [*range(10, 23)]
    drawn = [
        number
        for step in range(13)
        for number in draw_numbers(numbers, 5, range(4 * step, 4 * step + 4))
    ]
    passes = [drawn[first : first + 13] for first in range(0, 52, 13)]
    assert all(Counter(one) == Counter(numbers) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    assert draw_numbers(numbers, 5, range(12, 16)) == drawn[12:16]
    assert draw_numbers(numbers, 6, range(4)) != drawn[:4]


class Halves:
    """Reference that gives token t the probability 1 / (1 + t mod 3), the last ones only."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        return [
            np.array([-np.log(1 + token % 3) for token in tokens[-count:]], np.float32)
            for tokens, count in zip(sequences, last, strict=True)
        ]


def test_a_held_out_loss_is_that_of_its_trained_tokens(tmp_path: Path) -> None:
    rows = [row(1, [0, 0, 1, 1], "test"), row(2, [0, 2.0], "test"), row(5, [0, 1], "train")]
    texts = Texts(
        write_table(pa.Table.from_pylist(rows, schema=TEXT_SCHEMA), tmp_path / "texts.parquet")
    )
    score_given.make(tmp_path / "loss.json", texts, Halves(), 10, 0)
    found = read_measure(tmp_path / "loss.json")
    # Tokens 12, 13 and 21 have the probabilities 1, 1/2 and 1; the last counts twice.
    assert (found.examples, found.tokens) == (2, 3)
    assert found.value == pytest.approx(np.log(2) / 4)
    assert found.beside["bits_per_byte"] == pytest.approx(1 / 6)
    ratios = np.array([np.log(2) - found.value * 2, -found.value * 2])
    assert found.standard_error == pytest.approx(np.sqrt(2 * (ratios @ ratios)) / 4)


class Better(Halves):
    """Reference that gives every token of a text half a nat more, and of one text a bit more."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        scored = super().score(sequences, last)
        return [one + 0.5 + 0.01 * (number % 2) for number, one in enumerate(scored)]


def test_the_gain_of_texts_is_that_of_each_of_them(tmp_path: Path) -> None:
    """Their losses are far apart, and what they gain is not."""
    rows = [row(number, [0, *[1] * (number % 4 + 1)], "test") for number in range(16)]
    texts = Texts(
        write_table(pa.Table.from_pylist(rows, schema=TEXT_SCHEMA), tmp_path / "texts.parquet")
    )
    for name, policy in (("before", Halves()), ("after", Better())):
        score_given.make(tmp_path / name, texts, policy, 16, 0)
    before, after = (read_measure(tmp_path / name) for name in ("before", "after"))
    gain = find_measured_gain(before, after)
    assert gain is not None
    assert gain.value == pytest.approx(after.value - before.value)
    lower, upper = gain.interval
    assert -0.52 < lower < gain.value < upper < -0.49
    older = before.model_copy(update={"by_example": ()})
    assert str(gain).startswith(f"{-gain.value:.2f} lower ({-upper:.2f} to {-lower:.2f} with 95 %")
    risen = find_measured_gain(after, before)
    assert str(risen).startswith(f"{-gain.value:.2f} higher ({-upper:.2f} to {-lower:.2f} with")

    apart = find_measured_gain(older, after)
    assert apart is not None
    assert apart.value == pytest.approx(gain.value)
    assert apart.interval[1] - apart.interval[0] > 20 * (upper - lower)
    assert str(apart).endswith("with 95 % confidence, as if of other examples)")


def test_the_loss_of_one_text_has_no_interval(tmp_path: Path) -> None:
    rows = [row(1, [0, 0, 1, 1], "test"), row(2, [0, 2.0], "test")]
    texts = Texts(
        write_table(pa.Table.from_pylist(rows, schema=TEXT_SCHEMA), tmp_path / "texts.parquet")
    )
    score_given.make(tmp_path / "loss.json", texts, Halves(), 1, 0)
    found = read_measure(tmp_path / "loss.json")
    assert (found.examples, found.standard_error, found.interval) == (1, None, None)
