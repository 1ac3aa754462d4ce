"""Preference losses: their formulas, their derivatives, and what does not change them."""

from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.tinker.live_policy import ServiceLoss
from ratchet.tasks.algorithm.losses import check_loss
from ratchet.tasks.algorithm.preferences import (
    PREFERENCES,
    SIDES,
    PairTokens,
    compare_pairs,
    find_preference,
)
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.datums import Term

LABELLED = [name for name, row in PREFERENCES.items() if row.labelled]
SETTINGS: dict[str, Settings] = {"dpo": {"smoothing": 0.1}, "kto": {"undesirable_weight": 1.5}}


def sequences(
    pairs: int, seed: int = 0, *, labelled: bool = False
) -> tuple[PairTokens, list[np.ndarray]]:
    """Draw sequences of pairs, of 1 to 2 parts a side, and their log-probabilities.

    Of labelled answers every third is good, and has the chosen side alone, others the rejected one.
    """
    rng = np.random.default_rng(seed)
    numbers, sides, references, masks, logprobs = [], [], [], [], []
    for pair in range(pairs):
        for side in range(len(SIDES)):
            if labelled and side == (pair % 3 == 0):
                continue
            for _ in range(1 if side == 2 else rng.integers(1, 3)):
                length = int(rng.integers(2, 6))
                mask = (rng.random(length) < 0.7).astype(np.float64)
                mask[-1] = 1
                numbers.append(pair)
                sides.append(side)
                masks.append(mask)
                references.append(-rng.random(length) * mask)
                logprobs.append(-rng.random(length) * 2)
    return PairTokens(np.array(numbers), np.array(sides), references, masks), logprobs


def mean_loss(name: str, tokens: PairTokens, logprobs: list[np.ndarray]) -> float:
    row, settings = find_preference(name), SETTINGS.get(name, {})
    return float(compare_pairs(row, settings, tokens, logprobs)[0].mean())


def derivatives_sent(name: str, tokens: PairTokens, logprobs: list[np.ndarray]) -> list[np.ndarray]:
    loss: ServiceLoss = Term(name, SETTINGS.get(name, {})).service_loss()
    assert loss.derivative is not None
    inputs = [
        {"pair": np.array([p]), "side": np.array([s]), "references": r, "weights": m}
        for p, s, r, m in zip(
            tokens.pairs, tokens.sides, tokens.references, tokens.masks, strict=True
        )
    ]
    return [*loss.derivative(logprobs, inputs)]


@pytest.mark.parametrize(
    ("name", "labelled"), [*((name, False) for name in PREFERENCES), *((n, True) for n in LABELLED)]
)
def test_the_weights_that_are_sent_are_the_derivative_of_the_batch_s_loss(
    name: str, labelled: bool
) -> None:
    tokens, logprobs = sequences(4 if labelled else 3, labelled=labelled)
    found = derivatives_sent(name, tokens, logprobs)
    constant = [*tokens.sides].index(2) if name == "kto" else None
    for at, (values, slopes) in enumerate(zip(logprobs, found, strict=True)):
        if tokens.sides[at] == 2 and constant is not None:
            assert not slopes.any(), "what the mismatched sides say is held constant"
            continue
        for place in range(len(values)):
            ends = []
            for apart in (1e-6, -1e-6):
                moved = [one.copy() for one in logprobs]
                moved[at][place] += apart
                ends.append(mean_loss(name, tokens, moved))
            assert slopes[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


AT_START = {"dpo": log(2), "hinge": 1, "ipo": 1 / (4 * 0.1**2), "kto": (1 + 1.5) / 4}


@pytest.mark.parametrize("name", [name for name, row in PREFERENCES.items() if row.reference])
def test_a_policy_that_is_its_own_reference_has_the_loss_of_the_closed_form(name: str) -> None:
    tokens, _ = sequences(4)
    found = mean_loss(name, tokens, [*tokens.references])
    assert found == pytest.approx(AT_START.get(name, 1), abs=1e-12)


@pytest.mark.parametrize(("name", "expected"), [("kto", (2 + 2 * 1.5) / 8), ("apo_zero", 0.5)])
def test_labelled_answers_have_the_loss_of_their_own_side(name: str, expected: float) -> None:
    """Two good answers and two bad ones, whose weight in `kto` is 1.5."""
    tokens, _ = sequences(4, labelled=True)
    found = mean_loss(name, tokens, [*tokens.references])
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_labelled_answer_is_compared_with_the_mismatched_ones() -> None:
    """z is 1: the good answer is 2 better than it, the bad one 1 worse."""
    tokens = PairTokens(
        np.array([0, 0, 1, 1]),
        np.array([0, 2, 1, 2]),
        [np.array([-3.0]), np.array([-2.0]), np.array([-1.0]), np.array([-2.0])],
        [np.array([1.0])] * 4,
    )
    logprobs = [np.array([value]) for value in (0.0, -0.5, -1.0, -1.5)]
    losses, margins = compare_pairs(find_preference("kto"), {"beta": 0.5}, tokens, logprobs)
    assert margins == pytest.approx([2.0, 1.0])
    assert losses == pytest.approx([1 / (1 + np.exp(1.0)), 1 / (1 + np.exp(0.5))])
    losses, margins = compare_pairs(find_preference("apo_zero"), {"beta": 0.5}, tokens, logprobs)
    assert margins == pytest.approx([3.0, 0.0])
    assert losses == pytest.approx([1 / (1 + np.exp(1.5)), 0.5])


def test_mismatched_answers_of_both_sides_count_alike() -> None:
    """h of the mismatched answers is 3 and -5, so that z is 0, and not the 3 of the chosen one.

    The answers of the pair have h of 1 and -1. TRL's KTOTrainer, to which a pair is two answers,
    has the same two terms, 1 - σ(β) each, and their mean.
    """
    tokens = PairTokens(
        np.array([0, 0, 0, 0]),
        np.array([0, 1, 2, 2]),
        [np.array([-6.0])] * 4,
        [np.array([1.0])] * 4,
    )
    logprobs = [np.array([value]) for value in (-5.0, -7.0, -3.0, -11.0)]
    losses, _ = compare_pairs(find_preference("kto"), {"beta": 0.1}, tokens, logprobs)
    assert losses == pytest.approx([1 / (1 + np.exp(0.1))])
    better = [*logprobs[:3], np.array([-5.0])]
    losses, _ = compare_pairs(find_preference("kto"), {"beta": 0.1}, tokens, better)
    apart = [1 / (1 + np.exp(0.1 * (1 - 2))), 1 / (1 + np.exp(0.1 * (2 + 1)))]
    assert losses == pytest.approx([np.mean(apart)])


def test_numbers_that_a_reader_can_check() -> None:
    """Two pairs of one token a side: Δ is 2 and 0, the lengths are 1."""
    tokens = PairTokens(
        np.array([0, 0, 1, 1]),
        np.array([0, 1, 0, 1]),
        [np.array([-1.0])] * 4,
        [np.array([1.0])] * 4,
    )
    logprobs = [np.array([value]) for value in (-0.5, -2.5, -1.0, -1.0)]
    losses, margins = compare_pairs(find_preference("dpo"), {"beta": 0.5}, tokens, logprobs)
    assert margins == pytest.approx([2.0, 0.0])
    assert losses == pytest.approx([log(1 + np.exp(-1.0)), log(2)])
    slopes = derivatives_sent("dpo", tokens, logprobs)
    assert len(slopes) == 4
    losses, _ = compare_pairs(find_preference("ipo"), {"beta": 0.5}, tokens, logprobs)
    assert losses == pytest.approx([(2 - 1) ** 2, 1.0])
    losses, _ = compare_pairs(find_preference("hinge"), {"beta": 0.4}, tokens, logprobs)
    assert losses == pytest.approx([0.2, 1.0])
    losses, _ = compare_pairs(find_preference("simpo"), {"gamma": 1.0}, tokens, logprobs)
    assert losses == pytest.approx([log(1 + np.exp(-3.0)), log(1 + np.exp(1.0))])
    losses, _ = compare_pairs(find_preference("cpo"), {"beta": 1.0}, tokens, logprobs)
    assert losses.mean() == pytest.approx(
        (log(1 + np.exp(-2.0)) + log(2)) / 2 + (0.5 + 1.0) / 2, abs=1e-12
    )


@pytest.mark.parametrize("name", PREFERENCES)
@given(seed=st.integers(0, 2**20))
def test_the_order_of_pairs_and_of_sequences_changes_nothing(name: str, seed: int) -> None:
    tokens, logprobs = sequences(3, seed)
    order = np.random.default_rng(seed).permutation(len(logprobs))
    shuffled = PairTokens(
        tokens.pairs[order],
        tokens.sides[order],
        [tokens.references[at] for at in order],
        [tokens.masks[at] for at in order],
    )
    found = derivatives_sent(name, shuffled, [logprobs[at] for at in order])
    expected = derivatives_sent(name, tokens, logprobs)
    for place, at in enumerate(order):
        assert found[place] == pytest.approx(expected[at], abs=1e-12)


@pytest.mark.parametrize(
    "name", [name for name in PREFERENCES if name not in ("kto", "cpo", "orpo")]
)
def test_the_loss_of_two_pairs_is_the_mean_of_each_alone(name: str) -> None:
    """All but those that share a constant, or a count of tokens, over the batch."""
    tokens, logprobs = sequences(2)
    alone = []
    for pair in (0, 1):
        own = [at for at, number in enumerate(tokens.pairs) if number == pair]
        part = PairTokens(
            tokens.pairs[own],
            tokens.sides[own],
            [tokens.references[at] for at in own],
            [tokens.masks[at] for at in own],
        )
        alone.append(mean_loss(name, part, [logprobs[at] for at in own]))
    assert mean_loss(name, tokens, logprobs) == pytest.approx(np.mean(alone))


def test_odds_of_certain_answers_are_finite() -> None:
    tokens, logprobs = sequences(1)
    certain = [np.zeros(len(one)) for one in logprobs]
    assert np.isfinite(mean_loss("orpo", tokens, certain))
    assert all(np.isfinite(one).all() for one in derivatives_sent("orpo", tokens, certain))


def test_a_preference_loss_is_none_of_rollouts() -> None:
    with pytest.raises(ValueError, match="no loss 'dpo'"):
        check_loss("dpo", {})
