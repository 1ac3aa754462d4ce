"""Rewards of a group → advantages, by numbers that can be checked by hand."""

from math import inf, nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.advantages import (
    ADVANTAGES,
    advantages_of,
    centred,
    is_uniform,
    leave_one_out,
    standardized,
)

every_estimator = pytest.mark.parametrize("estimator", ADVANTAGES.values(), ids=ADVANTAGES.keys())


def test_centred_takes_the_mean_away() -> None:
    assert centred([0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]


def test_standardized_divides_by_the_unbiased_deviation() -> None:
    # mean 2; squares 4 + 0 + 4 = 8 over n - 1 = 2 is 4; deviation 2.
    assert standardized([0.0, 2.0, 4.0]) == [-1.0, 0.0, 1.0]
    # The population's deviation of (0, 1) is 1/2 and would give -1 and 1.
    assert standardized([0.0, 1.0]) == pytest.approx([-sqrt(0.5), sqrt(0.5)])


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # 4 - (0 + 2) / 2 = 3; 2 - (0 + 4) / 2 = 0; 0 - (2 + 4) / 2 = -3
    assert leave_one_out([0.0, 2.0, 4.0]) == [-3.0, 0.0, 3.0]


@every_estimator
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7])
def test_a_uniform_group_teaches_exactly_nothing(estimator, reward: float) -> None:
    assert estimator([reward] * 3) == [0.0, 0.0, 0.0]
    assert estimator([reward]) == [0.0]
    assert is_uniform([reward] * 3)


@every_estimator
@given(rewards=st.lists(st.integers(-10, 10), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_its_order(estimator, rewards) -> None:
    advantages = estimator([float(reward) for reward in rewards])
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert advantages[best] == max(advantages)


def test_a_missing_reward_is_not_a_zero() -> None:
    groups = {"g0": {"r0": 1.0, "r1": None, "r2": 3.0}, "g1": {"r3": None}}
    assert advantages_of(groups, "centred") == {"r0": -1.0, "r2": 1.0}


def test_each_group_has_its_own_baseline() -> None:
    groups = {"g0": {"a": 0.0, "b": 2.0}, "g1": {"c": 10.0, "d": 20.0}}
    assert advantages_of(groups, "centred") == {"a": -1.0, "b": 1.0, "c": -5.0, "d": 5.0}


def test_an_unknown_estimator_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no advantage 'gae'.*centred, standardized, leave_one"):
        advantages_of({}, "gae")


@pytest.mark.parametrize("reward", [nan, inf, -inf])
def test_a_reward_that_is_no_finite_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(ValueError, match=r"rollout r1 has the reward"):
        advantages_of({"g": {"r0": 0.0, "r1": reward}}, "centred")
