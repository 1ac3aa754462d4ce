"""What an agent returns → the reward of its rollout, of its roles and of their calls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from adapters.calls import POLICY

Given = float | dict[str, float | list[float]]
"""What an agent may return, as plain values."""


class RewardError(ValueError):
    """An agent returned something that is not a reward."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What a rollout earned.

    `value` is its headline: the number that the agent returned; of several roles the policy's, or
    else their mean. `roles` is empty where the agent named none: then each has earned `value`. A
    role with rewards for its `calls`, in their order, has earned their sum.
    """

    value: float
    roles: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def to_json(self) -> Given:
        """The plain value that `read_reward` reads as this reward."""
        if not self.roles:
            return self.value
        calls = {role: [*rewards] for role, rewards in self.calls.items()}
        return {**self.roles, **calls}


def read_reward(value: Any) -> Reward:
    """The reward in an agent's returned value; RewardError if there is none."""
    if _is_number(value):
        return Reward(float(value))
    if not isinstance(value, Mapping) or not value:
        raise _no_reward(value)
    calls = {role: _numbers(value, role) for role, rewards in value.items() if _is_list(rewards)}
    roles = {
        role: math.fsum(calls[role]) if role in calls else _number(value, role) for role in value
    }
    return Reward(roles.get(POLICY, fmean(roles.values())), roles, calls)


def check_roles(reward: Reward, calls: Mapping[str, int]) -> None:
    """Refuse rewards for roles or calls that there are not; `calls` are the answered, by role."""
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


def _numbers(value: Mapping[str, Any], role: str) -> tuple[float, ...]:
    if not all(map(_is_number, value[role])):
        raise _no_reward(value)
    return tuple(map(float, value[role]))


def _number(value: Mapping[str, Any], role: str) -> float:
    if not isinstance(role, str) or not _is_number(value[role]):
        raise _no_reward(value)
    return float(value[role])


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _no_reward(value: Any) -> RewardError:
    return RewardError(
        f"the agent returned {value!r} as its reward; a finite number is needed, or for each role "
        "a number or a list with one for each of its calls"
    )
