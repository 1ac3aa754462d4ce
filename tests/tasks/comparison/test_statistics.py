"""Means and differences of paired examples: their intervals hold, and a tie is no gain."""

import math

import numpy as np
import pytest

from ratchet.tasks.comparison.comparisons import find_difference, sign_flip_p_value
from ratchet.tasks.comparison.statistics import (
    find_gain,
    interval_of,
    interval_of_mean,
    interval_of_ratio,
    pass_at,
    student95,
)

PAIRS = 1_000


def covered(differences: np.ndarray, truth: float) -> float:
    """Return the share of simulations, a row each, whose interval holds the true difference."""
    intervals = [interval_of_mean(row) for row in differences.tolist()]
    return float(np.mean([low <= truth <= high for low, high in filter(None, intervals)]))


@pytest.mark.parametrize(("examples", "wins", "losses"), [(40, 0.3, 0.1), (128, 0.1, 0.1)])
def test_intervals_of_won_and_lost_examples_hold_the_truth_in_95_of_100(
    examples: int, wins: float, losses: float
) -> None:
    drawn = np.random.default_rng(1).choice(
        [1.0, -1.0, 0.0], (PAIRS, examples), p=[wins, losses, 1 - wins - losses]
    )
    assert 0.935 <= covered(drawn, wins - losses) <= 0.97


@pytest.mark.parametrize("examples", [8, 64])
def test_intervals_of_continuous_rewards_hold_the_truth_in_95_of_100(examples: int) -> None:
    generator = np.random.default_rng(2)
    difficulty = generator.normal(0, 1, (PAIRS, examples))  # shared by both, so that it cancels
    first = difficulty + generator.normal(0.2, 0.3, (PAIRS, examples))
    second = difficulty + generator.normal(0, 0.3, (PAIRS, examples))
    assert 0.935 <= covered(first - second, 0.2) <= 0.97


def test_intervals_hold_the_truth_where_an_example_has_several_rollouts() -> None:
    """Rollouts of an example share its chance of success, and are not independent."""
    generator = np.random.default_rng(3)
    chance = generator.beta(0.5, 0.5, (PAIRS, 64)) * 0.8
    means = [generator.binomial(4, chance + gain) / 4 for gain in (0.1, 0)]
    assert 0.935 <= covered(means[0] - means[1], 0.1) <= 0.97


def test_chance_alone_is_called_a_gain_at_most_as_often_as_it_is_said_to_be() -> None:
    drawn = np.random.default_rng(4).choice([1.0, -1.0, 0.0], (PAIRS, 32), p=[0.2, 0.2, 0.6])
    gains = [find_difference([(one, 0.0) for one in row]).is_gain for row in drawn.tolist()]
    assert np.mean(gains) <= 0.03


def test_the_ends_of_the_interval_are_where_the_likeliest_proportions_make_a_score_of_196() -> None:
    won, lost, count = 12, 2, 50
    for end, score in zip(
        interval_of_mean([1.0] * won + [-1.0] * lost + [0.0] * 36) or (), (1, -1), strict=True
    ):
        losing = np.linspace(max(0, -end), (1 - end) / 2, 1_000_002)[1:-1]
        tied = 1 - 2 * losing - end
        likelihood = won * np.log(losing + end) + lost * np.log(losing)
        likelihood += (count - won - lost) * np.log(tied)
        variance = count * (2 * losing[likelihood.argmax()] + end - end**2)
        distance = (won - lost - count * end) / math.sqrt(variance)
        assert distance == pytest.approx(1.96 * score, abs=1e-3)


def test_the_p_value_of_won_and_lost_examples_is_mcnemar_s() -> None:
    assert sign_flip_p_value([1.0] * 6 + [0.0] * 9) == pytest.approx(2 / 2**6)
    chances = [math.comb(12, lost) for lost in range(3)]
    differences = [1.0] * 10 + [-1.0] * 2
    assert sign_flip_p_value(differences) == pytest.approx(2 * sum(chances) / 2**12)
    many = sign_flip_p_value([1.0] * 20 + [-1.0] * 8)
    assert many == pytest.approx(2 * sum(math.comb(28, k) for k in range(9)) / 2**28, abs=0.004)
    assert sign_flip_p_value([0.0, 0.0]) == 1.0


def test_student_s_quantiles_are_those_of_the_tables() -> None:
    table = {2: 4.3027, 5: 2.5706, 10: 2.2281, 30: 2.0423}
    assert {n: student95(n) for n in table} == pytest.approx(table, rel=0.01)


def test_no_tie_is_a_gain_and_none_is_seen_in_few_examples() -> None:
    tie = find_difference([(1.0, 1.0)] * 20)
    assert tie.interval is not None
    assert tie.interval[0] < 0 < tie.interval[1]
    assert (tie.mean, tie.p_value, tie.tied, tie.is_gain) == (0.0, 1.0, 20, False)
    assert not find_difference([(0.5, 0.5)] * 20).is_gain
    assert not find_difference([(0.75, 0.5)] * 5).is_gain, "the same gain in all of five by chance"
    assert find_difference([(0.75, 0.5)] * 6).is_gain
    assert not find_difference([(0.5, 0.75)] * 6).is_gain
    assert not find_difference([]).is_gain
    assert str(find_difference([(0.5, 0.25)] * 2)) == "not known from 2 examples"


def test_the_interval_of_a_ratio_holds_the_truth_in_95_of_100() -> None:
    """Texts of 5 to 60 tokens lose some 0.3 nats a token, each by its own."""
    random, held = np.random.default_rng(0), 0
    for _ in range(1000):
        weights = random.integers(5, 61, 40)
        lost = weights * random.normal(-0.3, 0.2, 40)
        found = interval_of_ratio(lost.tolist(), weights.tolist())
        assert found is not None
        held += found[0] <= -0.3 <= found[1]
    assert 0.93 < held / 1000 < 0.97


def test_examples_of_one_weight_have_the_interval_of_their_mean() -> None:
    differences = [0.5, 0.25, 1.0, -0.5]
    expected = interval_of_mean(differences)
    assert expected is not None
    assert interval_of_ratio([3 * one for one in differences], [3.0] * 4) == expected


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    # Of 4 rollouts 1 passed: a pair holds it in 3 of the 6 pairs.
    assert pass_at(2, rollouts=4, passed=1) == 0.5
    assert [pass_at(k, 4, 1) for k in (1, 3, 4)] == [0.25, 0.75, 1.0]
    assert pass_at(1, 4, 0) == 0.0
    assert pass_at(3, 4, 2) == 1.0
    with pytest.raises(ValueError, match="pass@5 needs k of 1 to 4"):
        pass_at(5, 4, 1)


def test_the_interval_of_zeros_and_ones_is_wilsons() -> None:
    # 5 of 10: .5 ± 1.96 / 1.384 * sqrt(.025 + .0096), as Wilson (1927) has it.
    assert interval_of([1.0, 0.0] * 5) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    low, high = interval_of([0.0] * 10) or (1.0, 0.0)
    assert low == pytest.approx(0.0)
    assert high == pytest.approx(0.2775, abs=1e-4)


def test_the_interval_of_other_rewards_is_students() -> None:
    # A deviation of .25 over three examples, which have two degrees of freedom.
    half = student95(2) * 0.25 / math.sqrt(3)
    assert interval_of([0.75, 0.25, 0.5]) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    assert interval_of([0.75]) is None
    assert interval_of([]) is None


@pytest.mark.parametrize("count", [3, 6, 20, 500])
@pytest.mark.parametrize("value", [0.2, 0.6, -2.0, 2.0])
def test_equal_scores_have_an_interval_with_a_width(value: float, count: int) -> None:
    """About 3 in n of the examples that were not seen may have another one, of -1 to 1."""
    for found in (interval_of([value] * count), interval_of_mean([value] * count)):
        assert found is not None
        assert found[0] - 1e-9 <= value <= found[1] + 1e-9
        assert 0 < found[1] - found[0] <= 3 / count * max(2, 1 + abs(value))
    rounded = [0.6, 3 * 0.2] * count
    assert interval_of(rounded) == pytest.approx(interval_of([0.6] * 2 * count))
    assert str(find_gain([0.2] * 6, [0.4] * 6, [1.0] * 6)) == (
        "+0.20 (-0.27 to +0.51 with 95 % confidence, 6 examples)"
    )
    assert interval_of([0.2] * 6) == pytest.approx((0.1214, 0.5144), abs=1e-4)


@pytest.mark.parametrize("examples", [3, 6, 12])
def test_an_interval_of_few_scores_holds_the_truth_where_most_are_equal(examples: int) -> None:
    """Nine of ten examples have 0.2 and one has 1, so that most small sets are all equal."""
    drawn = np.where(np.random.default_rng(5).random((PAIRS, examples)) < 0.9, 0.2, 1.0)
    found = [interval_of(row) or (0.0, 1.0) for row in drawn.tolist()]
    assert np.mean([low <= 0.28 <= high for low, high in found]) >= 0.95
