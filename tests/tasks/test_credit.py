"""Rewards of roles and calls → returns, and the advantages that datums carry; numbers by hand."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from ratchet.tasks.algorithm.advantages import Earned
from ratchet.tasks.credit import CreditUnit, calls_of, group_earnings, returns_to_go
from ratchet.tasks.rewards import rewards_of
from tests.support.credited import build, credited
from tests.support.trajectory_rows import table

GROUP = "train-00000-0000"


def trajectory(
    k: int, reward: float | None, calls: list[float | None], role: str = "policy", first: int = 0
) -> dict:
    """Each call observes one token and samples two; `calls` is the reward of each."""
    rewards = None if None in calls else calls
    return {
        "rollout_id": f"{GROUP}-{k:02d}",
        "group_id": GROUP,
        "role": role,
        "first_call": first,
        "policy_version": "00000",
        "reward": reward,
        "tokens": list(range(3 * len(calls))),
        "logprobs": [0.0, -1.0, -1.0] * len(calls),
        "mask": [0, 1, 1] * len(calls),
        "call_numbers": [first + place for place in range(len(calls))],
        "call_tokens": [3] * len(calls),
        "call_rewards": rewards,
    }


def earnings(
    *rows: dict,
    discount: float = 1.0,
    unit: CreditUnit = "rollout",
    penalties: np.ndarray | None = None,
) -> list[Sequence[Earned]]:
    trajectories = table(*rows)
    calls = calls_of(trajectories, penalties)
    rollouts = {
        row["rollout_id"]: (row["reward"], calls[row["role"], row["rollout_id"]])
        for row in rewards_of(trajectories).to_pylist()
    }
    return [*group_earnings(rollouts, discount, unit).values()]


def returns(*rows: dict, discount: float = 1.0) -> list[list[float]]:
    earned = earnings(*rows, discount=discount)
    return [[call.returned for call in calls] for calls in earned]


def advantages(datums: pa.Table) -> list[list[float]]:
    """Return the advantages of each datum's trained tokens."""
    return [
        [value for value, bit in zip(row["advantages"], row["mask"], strict=True) if bit]
        for row in datums.to_pylist()
    ]


@pytest.mark.parametrize(
    ("discount", "expected"),
    [(1.0, [3.0, 2.0, 2.0]), (0.5, [1.5, 1.0, 2.0]), (0.0, [1.0, 0.0, 2.0])],
)
def test_a_call_returns_its_reward_and_the_discounted_later_ones(
    discount: float, expected: list[float]
) -> None:
    assert returns_to_go([1.0, 0.0, 2.0], discount) == expected


def test_one_reward_is_the_return_of_all_calls_or_discounted_of_the_last() -> None:
    rows = trajectory(0, 1.0, [None, None, None]), trajectory(1, 0.0, [None])
    assert returns(*rows) == [[1.0], [0.0]]
    assert returns(*rows, discount=0.5) == [[0.25, 0.5, 1.0], [0.0]]


def test_one_reward_counts_for_the_last_call_if_others_reward_calls() -> None:
    rows = trajectory(0, 1.0, [None, None]), trajectory(1, 3.0, [1.0, 2.0])
    assert returns(*rows) == [[1.0, 1.0], [3.0, 2.0]]


def test_the_rewards_of_a_role_s_calls_are_summed_over_its_trajectories() -> None:
    broken = trajectory(0, 6.0, [1.0, 2.0]), trajectory(0, 6.0, [3.0], first=2)
    assert returns(*broken, discount=0.5) == [[2.75, 3.5, 3.0]]


def test_calls_are_told_apart_by_what_they_observed_and_count_what_they_sampled() -> None:
    """The first call of each rollout observes token 0, the second token 3."""
    rows = trajectory(0, 1.0, [None, None]), trajectory(1, 0.0, [None])
    (first, second), (other,) = earnings(*rows, unit="call")
    assert first.state == other.state != second.state
    assert [call.tokens for call in (first, second, other)] == [2, 2, 2]
    assert [(call.returned, call.reward) for call in (first, second)] == [(1.0, 1.0)] * 2
    (shared,), _ = earnings(*rows)
    assert shared.tokens == 4


def test_penalties_lessen_the_reward_of_their_call_and_the_returns_before() -> None:
    """Two calls sample two tokens each, which cost 0.1, 0.2, 0.3 and 0.4; the reward is 1."""
    row = trajectory(0, 1.0, [None, None])
    costs = np.array([0.0, 0.1, 0.2, 0.0, 0.3, 0.4])
    ((shared,),) = earnings(row, penalties=costs)
    assert shared.returned == shared.reward == pytest.approx(0.0)
    (calls,) = earnings(row, unit="call", penalties=costs)
    assert [call.returned for call in calls] == pytest.approx([0.0, 0.3])
    (tokens,) = earnings(row, unit="token", penalties=costs)
    assert [token.returned for token in tokens] == pytest.approx([0.0, 0.1, 0.3, 0.6])
    (halved,) = earnings(row, unit="token", discount=0.5, penalties=costs)
    assert [token.returned for token in halved] == pytest.approx([-0.15, -0.05, 0.3, 0.6])


def test_rebn_compares_the_discounted_returns_of_all_calls() -> None:
    """With γ = 1/2 the returns are [1/2, 1] and [0]; mean 1/2, deviation 1/2."""
    rows = trajectory(0, 1.0, [None, None]), trajectory(1, 0.0, [None])
    datums = build(table(*rows), credited("rebn", discount=0.5))
    assert advantages(datums) == [[0.0, 0.0, 1.0, 1.0], [-1.0, -1.0]]


def test_each_token_has_the_advantage_of_its_call() -> None:
    """With γ = 0.5 the returns are [1, 0], [0.5, 1] and [0, 0]; their means 0.5 and 1/3."""
    rows = [
        trajectory(0, 1.0, [1.0, 0.0]),
        trajectory(1, 1.0, [0.0, 1.0]),
        trajectory(2, 0.0, [0.0, 0.0]),
    ]
    datums = build(table(*rows), credited("centred", discount=0.5))
    assert advantages(datums) == [
        pytest.approx([0.5, 0.5, -1 / 3, -1 / 3]),
        pytest.approx([0.0, 0.0, 2 / 3, 2 / 3]),
        pytest.approx([-0.5, -0.5, -1 / 3, -1 / 3]),
    ]
    assert datums["advantage"].to_pylist() == pytest.approx([1 / 12, 1 / 3, -5 / 12])


def test_a_turn_that_kept_no_tokens_has_the_advantage_of_each_call() -> None:
    rows = [
        trajectory(0, 1.0, [1.0]),
        trajectory(0, 1.0, [0.0], first=1),
        trajectory(1, 1.0, [0.0, 1.0]),
    ]
    datums = build(table(*rows), credited("centred", discount=0.0))
    assert advantages(datums) == [[0.5, 0.5], [-0.5, -0.5], [-0.5, -0.5, 0.5, 0.5]]


def test_a_role_is_compared_with_the_same_role_and_needs_a_reward_to_train() -> None:
    rows = [
        trajectory(0, 1.0, [None], role="teller"),
        trajectory(0, 8.0, [None], role="listener"),
        trajectory(1, 0.0, [None], role="teller"),
        trajectory(1, 2.0, [None], role="listener"),
        trajectory(2, 0.5, [None], role="teller"),
        trajectory(2, None, [None], role="listener"),
    ]
    datums = build(table(*rows), credited("centred", min_group_size=2))
    made = zip(datums["role"].to_pylist(), datums["advantage"].to_pylist(), strict=True)
    assert list(made) == [("teller", 0.5), ("listener", 3.0), ("teller", -0.5), ("listener", -3.0)]


def test_a_role_with_too_few_rollouts_in_a_group_is_left_out_alone() -> None:
    rows = [
        trajectory(0, 1.0, [None], role="teller"),
        trajectory(0, 1.0, [None], role="listener"),
        trajectory(1, 0.0, [None], role="teller"),
        trajectory(1, None, [None], role="listener"),
    ]
    datums = build(table(*rows), credited("centred", min_group_size=2))
    assert datums["role"].to_pylist() == ["teller", "teller"]
