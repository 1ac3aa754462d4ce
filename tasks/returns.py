"""trajectories → returns: what each call of a trained role earned from then on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pyarrow as pa

from tasks.trajectories import rewards_by_role

Returns = dict[str, list[float]]
"""Rollout → a return for each of its calls, in their order; or one for all of them."""

Calls = dict[int, float | None]
"""The numbers of a role's calls in a rollout, in order; with the reward of each, if it has one."""


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """G_t = r_t + γ G_(t+1): Sutton and Barto, Reinforcement Learning, 2nd edition, (3.9)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def returns_by_role(trajectories: pa.Table, discount: float = 1.0) -> dict[str, dict[str, Returns]]:
    """Role → group → returns, of the rollouts in which the role is trained and has a reward.

    A reward that is one number is the return of each call of the role. But where it is discounted,
    or other rollouts of its group have rewards for their calls, it is the reward of the last one.
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
    """Role and rollout → its calls; none where a version wrote them that did not record calls."""
    if "call_numbers" not in trajectories.column_names:
        return {}
    columns = ["role", "rollout_id", "call_numbers", "call_rewards"]
    calls: dict[tuple[str, str], Calls] = defaultdict(dict)
    for row in trajectories.select(columns).to_pylist():
        numbers = row["call_numbers"]
        rewards = row["call_rewards"] or [None] * len(numbers)
        calls[row["role"], row["rollout_id"]].update(zip(numbers, rewards, strict=True))
    return {name: dict(sorted(by_number.items())) for name, by_number in calls.items()}


def _returns(rollouts: Mapping[str, tuple[float, Calls]], discount: float) -> Returns:
    """Of one group; `rollouts` is the reward of each, and its calls."""
    by_call = any(reward is not None for _, calls in rollouts.values() for reward in calls.values())
    if discount == 1.0 and not by_call:
        return {rollout: [reward] for rollout, (reward, _) in rollouts.items()}
    return {
        rollout: returns_to_go(_call_rewards(rollout, *earned), discount)
        for rollout, earned in rollouts.items()
    }


def _call_rewards(rollout: str, reward: float, calls: Calls) -> list[float]:
    if not calls:
        raise ValueError(
            f"the trajectories of {rollout} were written by a version of Ratchet that knew no "
            "rewards of calls, and cannot be discounted; delete their file, and they are made anew"
        )
    given = [earned for earned in calls.values() if earned is not None]
    return given or [0.0] * (len(calls) - 1) + [reward]
