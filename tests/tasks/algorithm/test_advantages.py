"""Returns of a step → advantages, by numbers that can be checked by hand."""

from math import exp, inf, log, nan, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.algorithm.advantages import ADVANTAGES, Earned, estimate_advantages, is_uniform
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.judging import _agreements
from ratchet.tasks.storage.tables import select

COMPARING = [name for name in ADVANTAGES if name not in ("none", "asymre")]
"""Advantages that compare with a mean alone."""

every_advantage = pytest.mark.parametrize("name", ADVANTAGES)
every_comparison = pytest.mark.parametrize("name", COMPARING)


def earned(rewards: dict[str, float]) -> dict[str, list[Earned]]:
    """One group's rollouts, each with one reward for all of its calls."""
    return {rollout: [Earned(reward, reward)] for rollout, reward in rewards.items()}


def advantages(name: str, rewards: list[float], settings: Settings | None = None) -> list[float]:
    """Return the advantages of a step with one group."""
    group = earned({f"r{place}": reward for place, reward in enumerate(rewards)})
    by_rollout = estimate_advantages({"g": group}, name, settings or {})
    return [by_rollout[rollout][0] for rollout in group]


def test_standardized_leaves_out_groups_of_a_deviation_below_the_threshold() -> None:
    assert advantages("standardized", [0.0, 2.0, 4.0], {"threshold": 2.0}) == [0.0, 0.0, 0.0]
    assert advantages("standardized", [0.0, 2.0, 4.0], {"threshold": 1.9}) == [-1.0, 0.0, 1.0]


def test_opmd_subtracts_the_mean_or_the_log_mean_exp() -> None:
    rewards = [0.0, 1.0, 4.0]
    assert advantages("opmd", rewards) == pytest.approx([r - 5 / 3 for r in rewards])
    for tau in (0.5, 2.0):
        settings: Settings = {"baseline": "log_mean_exp", "tau": tau}
        baseline = tau * log(fmean(exp(reward / tau) for reward in rewards))
        expected = pytest.approx([r - baseline for r in rewards], rel=1e-9)
        assert advantages("opmd", rewards, settings) == expected


def test_a_log_mean_exp_of_large_rewards_does_not_overflow() -> None:
    settings: Settings = {"baseline": "log_mean_exp", "tau": 0.01}
    high, low = advantages("opmd", [1000.0, 0.0], settings)
    assert (high, low) == (pytest.approx(0.01 * log(2)), pytest.approx(-1000 + 0.01 * log(2)))


def test_asymre_shifts_the_mean_down() -> None:
    assert advantages("asymre", [0.0, 1.0]) == pytest.approx([-0.4, 0.6])
    assert advantages("asymre", [1.0, 1.0], {"shift": -0.5}) == [0.5, 0.5]


TWO_GROUPS = {
    "easy": {"a": [Earned(1.0, 1.0, tokens=3)], "b": [Earned(0.0, 0.0, tokens=1)]},
    "hard": {"c": [Earned(5.0, 5.0, tokens=1)], "d": [Earned(0.0, 0.0, tokens=1)]},
}


def test_step_grpo_gives_each_call_the_advantage_of_its_rollout_or_a_share() -> None:
    step = {"g": {"a": [Earned(1.0, 1.0)] * 2, "b": [Earned(0.0, 0.0)] * 4}}
    whole = sqrt(0.5)
    assert estimate_advantages(step, "step_grpo", {}) == {
        "a": [pytest.approx(whole)] * 2,
        "b": [pytest.approx(-whole)] * 4,
    }
    assert estimate_advantages(step, "step_grpo", {"spread": "divide"}) == {
        "a": [pytest.approx(whole / 2)] * 2,
        "b": [pytest.approx(-whole / 4)] * 4,
    }


def test_gigpo_adds_the_advantage_of_a_call_among_those_that_observed_the_same() -> None:
    """At state s the returns are 2, 1 and 0, so b's two calls differ; t is met once."""
    step = {
        "g": {
            "a": [Earned(2.0, 2.0, state="s"), Earned(2.0, 2.0, state="t")],
            "b": [Earned(1.0, 0.0, state="s"), Earned(0.0, 0.0, state="s")],
        }
    }
    # The rollouts' advantages are 1 and -1; those of the calls at s 1, 0 and -1.
    assert estimate_advantages(step, "gigpo", {}) == {"a": [2.0, 1.0], "b": [-1.0, -2.0]}
    assert estimate_advantages(step, "gigpo", {"omega": 0.5}) == {
        "a": [1.5, 1.0],
        "b": [-1.0, -1.5],
    }
    deviation = stdev([2.0, 0.0])
    standardized = estimate_advantages(step, "gigpo", {"deviation": "group"})
    assert standardized["a"] == pytest.approx([1 / deviation + 1.0, 1 / deviation])


@every_comparison
@pytest.mark.parametrize(
    "rewards", [[0.0] * 3, [0.1] * 3, [-3.7] * 3, [0.6, 0.1 * 6, 0.6], [1e6, 1e6 - 1e-5, 1e6]]
)
def test_a_uniform_step_teaches_exactly_nothing(name: str, rewards: list[float]) -> None:
    assert advantages(name, rewards) == [0.0, 0.0, 0.0]
    assert advantages(name, rewards[:1]) == [0.0]
    assert is_uniform(rewards)


@given(st.lists(st.sampled_from([0.6, 0.1 * 6, 0.2 * 3, 0.0, 1e-7, -1e6, -1e6 + 1e-5]), min_size=1))
def test_queries_take_the_same_rewards_as_equal(rewards: list[float]) -> None:
    rows = select("select is_uniform($least, $most) as same", least=min(rewards), most=max(rewards))
    assert rows["same"].to_pylist() == [is_uniform(rewards)]


def test_a_judge_that_differs_by_rounding_neither_agrees_nor_disagrees() -> None:
    one, other, third = (f"train-00000-0000-0{number}" for number in range(3))
    rewards = {one: 0.6, other: 0.1 * 6, third: 0.0}
    assert [*_agreements({one: 0.3, other: 0.9, third: 0.1 * 3}, rewards)] == [0.5, 1.0]


def test_a_small_difference_of_rewards_is_one() -> None:
    assert not is_uniform([0.0, 1e-7, 0.0])
    assert not is_uniform([0.0, 1e-300])


@every_comparison
@given(rewards=st.lists(st.integers(-10, 10), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_its_order(name: str, rewards) -> None:
    made = advantages(name, [float(reward) for reward in rewards])
    assert sum(made) == pytest.approx(0.0, abs=1e-9)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert made[best] == max(made)


@every_advantage
def test_an_advantage_is_of_its_group_alone_if_its_row_says_so(name: str) -> None:
    alone = estimate_advantages({"easy": TWO_GROUPS["easy"]}, name, {})
    beside = estimate_advantages(TWO_GROUPS, name, {})
    assert ADVANTAGES[name].in_groups == all(beside[rollout] == alone[rollout] for rollout in alone)


@every_advantage
@given(groups=st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), max_size=4))
def test_every_call_gets_a_finite_advantage(name: str, groups) -> None:
    step = {
        f"g{g}": {
            f"r{g}-{r}": [Earned(float(value), float(value), tokens=1 + abs(value))] * (1 + r)
            for r, value in enumerate(values)
        }
        for g, values in enumerate(groups)
    }
    made = estimate_advantages(step, name, {})
    assert {rollout: len(of) for rollout, of in made.items()} == {
        rollout: len(of) for group in step.values() for rollout, of in group.items()
    }
    assert all(abs(value) < inf for of in made.values() for value in of)


@pytest.mark.parametrize("reward", [nan, inf, -inf])
def test_a_reward_that_is_no_finite_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(ValueError, match=r"rollout r1 has the reward"):
        estimate_advantages({"g": earned({"r0": 0.0, "r1": reward})}, "centred", {})
