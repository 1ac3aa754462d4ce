"""trajectories → returns: the discounted sum of the rewards from each call on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pyarrow as pa

from tasks.trajectories import rewards_by_role

Returns = dict[str, list[float]]
"""Rollout → the returns of its calls, in order; or one return for all of them."""

Calls = dict[int, float | None]
"""Number of each call of a role in a rollout, in order → its reward, if it has one."""


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute G_t = r_t + γ G_(t+1) (Sutton and Barto, 2nd edition, equation 3.9)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def returns_by_role(trajectories: pa.Table, discount: float = 1.0) -> dict[str, dict[str, Returns]]:
    """Map role → group → returns, of the rollouts in which the role is trained and has a reward.

    A reward that is one number is the return of each call of the role. If it is discounted, or if
    other rollouts of the group have rewards for their calls, it is the reward of the last call.
    """
    calls = calls_of(trajectories)
    return {
        role: {
            group: _returns(
                {r: (reward, calls.get((role, r), {})) for r, reward in rewards.items()}, discount
            )
            for group, rewards in groups.items()
        }
        for role, groups in rewards_by_role(trajectories).items()
    }


def calls_of(trajectories: pa.Table) -> dict[tuple[str, str], Calls]:
    """Map role and rollout to its calls."""
    columns = ["role", "rollout_id", "call_numbers", "call_rewards"]
    calls: dict[tuple[str, str], Calls] = defaultdict(dict)
    for row in trajectories.select(columns).to_pylist():
        numbers = row["call_numbers"]
        rewards = row["call_rewards"] or [None] * len(numbers)
        calls[row["role"], row["rollout_id"]].update(zip(numbers, rewards, strict=True))
    return {name: dict(sorted(by_number.items())) for name, by_number in calls.items()}


def _returns(rollouts: Mapping[str, tuple[float, Calls]], discount: float) -> Returns:
    """Compute the returns of one group from each rollout's reward and calls."""
    by_call = any(reward is not None for _, calls in rollouts.values() for reward in calls.values())
    if discount == 1.0 and not by_call:
        return {rollout: [reward] for rollout, (reward, _) in rollouts.items()}
    return {
        rollout: returns_to_go(_call_rewards(*earned), discount)
        for rollout, earned in rollouts.items()
    }


def _call_rewards(reward: float, calls: Calls) -> list[float]:
    given = [earned for earned in calls.values() if earned is not None]
    return given or [0.0] * (len(calls) - 1) + [reward]
