"""Learning-rate schedules and the minibatches of an update, by numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.tinker.live_policy import Pass
from ratchet.tasks.datums import (
    DATUM_SCHEMA,
    PAIR_DATUM_SCHEMA,
    REFERENCE_DATUM_SCHEMA,
    UpdateMethod,
    to_datums,
    units_of,
)
from ratchet.tasks.settings.algorithm import Divergence
from ratchet.tasks.settings.given import Expert
from ratchet.tasks.settings.run import Optimizer, ScheduleName


def method(substeps: int = 1, epochs: int = 1, *, by_batch: bool = False) -> UpdateMethod:
    optimizer = Optimizer(learning_rate=0.1, substeps=substeps, epochs=epochs)
    return UpdateMethod("ppo", {}, optimizer, 7, by_batch)


@pytest.mark.parametrize(
    ("schedule", "warmup", "final", "shares"),
    [
        ("constant", 0, 0, [1.0, 1.0, 1.0, 1.0]),
        ("linear", 0, 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 0, 0.2, [1.0, 0.8, 0.6, 0.4]),
        ("cosine", 0, 0, [1.0, 0.853553, 0.5, 0.146447]),
        ("linear", 2, 0, [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ("constant", 3, 0, [0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_shares_of_the_learning_rate(
    schedule: ScheduleName, warmup: int, final: float, shares: list[float]
) -> None:
    optimizer = Optimizer(
        learning_rate=0.1, schedule=schedule, warmup_steps=warmup, final_fraction=final
    )
    method = UpdateMethod("ppo", {}, optimizer, len(shares))
    rates = [method.request(step, []).optimizer.learning_rate for step in range(len(shares))]
    assert rates == pytest.approx([0.1 * share for share in shares], abs=1e-6)


@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    steps=st.integers(1, 50),
    warmup=st.integers(0, 49),
    floor=st.floats(0, 0.99),
)
def test_a_share_is_never_0_and_never_more_than_1(
    name: ScheduleName, steps: int, warmup: int, floor: float
) -> None:
    final, warmup = 0 if name == "constant" else floor, min(warmup, steps - 1)
    optimizer = Optimizer(schedule=name, warmup_steps=warmup, final_fraction=final)
    assert all(0 < optimizer.share(step, steps) <= 1 for step in range(steps))


def test_a_constant_learning_rate_is_exactly_the_recipe_s() -> None:
    assert {method().request(step, []).optimizer.learning_rate for step in range(7)} == {0.1}


@given(count=st.integers(0, 40), substeps=st.integers(1, 9), epochs=st.integers(1, 3))
def test_minibatches_hold_every_datum_once_an_epoch_and_differ_by_at_most_one(
    count: int, substeps: int, epochs: int
) -> None:
    datums: list = list(range(count))
    made = method(substeps, epochs)
    request = made.request(0, [[[datum] for datum in datums]])
    minibatches = [part.datums for (part,) in request.optimizer_steps]
    assert [datum for part in minibatches for datum in part] == datums * epochs
    sizes = {len(part) for part in minibatches}
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    assert made.optimizer_steps(count) == len(minibatches)


def test_optimizer_steps_are_taken_by_minibatch_and_otherwise_once() -> None:
    units: Any = [[number] for number in range(4)]
    assert len(method().request(0, [units]).optimizer_steps) == 1
    assert len(method(substeps=2).request(0, [units]).optimizer_steps) == 2
    assert len(method(epochs=2).request(0, [units]).optimizer_steps) == 2
    assert method(by_batch=True).optimizer_steps(5) == 1
    assert method(by_batch=True).optimizer_steps(0) == 0


ROW: dict[str, Any] = {
    "tokens": [1, 2],
    "targets": [2, 3],
    "logprobs": [0.0, -1.0],
    "advantages": [0.0, 1.0],
    "mask": [0, 1],
    "scale": 1 / 4,
}


def weights_sent(passes: Sequence[Pass]) -> float:
    """Sum the weights of cross-entropy that the passes of an optimizer step come to."""
    total = 0.0
    for asked in passes:
        inputs = [
            {name: given.to_numpy() for name, given in datum.loss_fn_inputs.items()}
            for datum in asked.datums
        ]
        if asked.loss.derivative is None:
            total += sum(float(of["weights"].sum()) for of in inputs)
            continue
        slopes = asked.loss.derivative([np.zeros(2)] * len(inputs), inputs)
        total += sum(float(np.abs(one).sum()) for one in slopes)
    return total


def test_a_minibatch_of_rollouts_has_its_part_of_the_step_s_mean() -> None:
    """Four datums of one token each; the step's loss is their mean."""
    rows = pa.Table.from_pylist([ROW] * 4, schema=DATUM_SCHEMA)
    for substeps, each in ((1, 1.0), (2, 0.5), (4, 0.25)):
        made = replace(method(substeps), loss="cross_entropy")
        units = units_of(to_datums(rows, "cross_entropy"), "cross_entropy")
        assert [*map(weights_sent, made.request(0, [units]).optimizer_steps)] == [each] * substeps


def test_a_minibatch_of_pairs_has_the_mean_over_its_own() -> None:
    """At the start the slope of each side of a pair is β / 2, of 4 pairs or of 1."""
    sides = [
        ROW | {"pair": pair, "side": side, "references": [0.0, 0.0], "scale": 1.0}
        for pair in range(4)
        for side in (0, 1)
    ]
    rows = pa.Table.from_pylist(sides, schema=PAIR_DATUM_SCHEMA)
    for substeps in (1, 2, 4):
        made = replace(method(substeps), loss="dpo", loss_settings={"beta": 0.1})
        units = units_of(to_datums(rows, "dpo", {"beta": 0.1}), "dpo")
        found = [*map(weights_sent, made.request(0, [units]).optimizer_steps)]
        assert found == pytest.approx([0.1] * substeps)


def test_a_penalty_in_the_loss_is_a_pass_of_the_tokens_of_its_minibatch() -> None:
    """It has the coefficient, and beside an expert the share of the rollouts."""
    rows = pa.Table.from_pylist(
        [ROW | {"references": [0.0, -2.0]}] * 4, schema=REFERENCE_DATUM_SCHEMA
    )
    penalty = Divergence(coefficient=0.5, estimator="k2")
    expert = Expert(path="texts.jsonl", share=0.2)
    made = replace(method(2), divergence=penalty, expert=expert)
    main, kept, texts = made.terms(0)
    assert (kept.loss, kept.factor, kept.file) == ("kl", 0.4, 0)
    assert (main.file, texts.file, made.files) == (0, 1, 2)
    units = [
        units_of(to_datums(rows, one.loss, one.settings, one.factor), one.loss)
        for one in (main, kept)
    ]
    for passes in made.request(0, [*units, []]).optimizer_steps:
        assert [(asked.term, asked.same_tokens, len(asked.datums)) for asked in passes] == [
            (0, False, 2),
            (1, True, 2),
        ]
        inputs = [
            {name: given.to_numpy() for name, given in datum.loss_fn_inputs.items()}
            for datum in passes[1].datums
        ]
        assert passes[1].loss.derivative is not None
        slopes = passes[1].loss.derivative([np.array([-9.0, -1.5])] * 2, inputs)
        assert np.array(slopes) == pytest.approx(np.array([[0.0, 0.5]] * 2))
        assert inputs[0]["weights"] == pytest.approx([0.0, 0.1])
