"""Parser of what an agent returns: the rewards of its rollout, its roles and their calls."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeGuard

from adapters.calls import POLICY

JsonReward = float | dict[str, float | list[float]]
"""A reward as an agent may return it."""


class RewardError(ValueError):
    """An error for a value that is not a reward."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A rollout's reward.

    `value` is the number that the agent returned; of several roles it is the policy's reward, or
    their mean if the policy has none. `roles` is empty if the agent named none: then each role has
    earned `value`. A role with rewards of its `calls`, in their order, has earned their sum.
    """

    value: float
    roles: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def to_json(self) -> JsonReward:
        """Return the plain value that `read_reward` reads as this reward."""
        if not self.roles:
            return self.value
        calls = {role: [*rewards] for role, rewards in self.calls.items()}
        return {**self.roles, **calls}


def read_reward(value: object) -> Reward:
    """Read the value that an agent returned; RewardError if it is not a reward."""
    if _is_number(value):
        return Reward(float(value))
    if not isinstance(value, Mapping) or not value:
        raise _no_reward(value)
    calls = {
        role: _read_numbers(value, rewards) for role, rewards in value.items() if _is_list(rewards)
    }
    roles = {
        role: math.fsum(calls[role]) if role in calls else _read_number(value, role)
        for role in value
    }
    return Reward(roles.get(POLICY, fmean(roles.values())), roles, calls)


def check_roles(reward: Reward, calls: Mapping[str, int]) -> None:
    """Refuse rewards of unknown roles or calls; `calls` is each role's number of answered calls."""
    for role in reward.roles:
        if role not in calls:
            known = ", ".join(calls)
            raise RewardError(
                f"the agent returned a reward for the role {role!r}, and the recipe's are: {known}"
            )
    for role, rewards in reward.calls.items():
        if len(rewards) != calls[role]:
            raise RewardError(
                f"the agent returned {len(rewards)} rewards for the calls of the role {role!r}, "
                f"and {calls[role]} were answered; return one for each, or one number for all"
            )


def _read_numbers(value: object, rewards: Sequence[object]) -> tuple[float, ...]:
    if not all(map(_is_number, rewards)):
        raise _no_reward(value)
    return tuple(float(reward) for reward in rewards if _is_number(reward))


def _read_number(value: Mapping[str, object], role: str) -> float:
    reward = value[role]
    if not isinstance(role, str) or not _is_number(reward):
        raise _no_reward(value)
    return float(reward)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, bool | int | float) and abs(value) <= sys.float_info.max


def _no_reward(value: object) -> RewardError:
    return RewardError(
        f"the agent returned {value!r} as its reward; a finite number is needed, or for each role "
        "a number or a list with one for each of its calls"
    )
