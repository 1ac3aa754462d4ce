"""Parser of what an agent returns: the rewards of its rollout, its roles and their calls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Complex, Number, Real
from statistics import fmean
from typing import Any, SupportsFloat

from ratchet.adapters.calls import POLICY, JsonObject

LARGEST = 1e6
"""Largest size of a reward: sums and squares of larger ones are beyond a float32's digits."""
NEEDED = (
    f"a finite number is needed, of at most {LARGEST:,.0f} in size, or for each role a number or a "
    "list with one for each of its calls"
)
MEASURE = "measure/"
"""Prefix of a number that an agent returns beside its reward, such as measure/consistent."""

BETTER = "better_rollout"
"""Column of the example of a judge: the id of the better one of its two `rollouts`."""


class RewardError(ValueError):
    """An error for a value that is not a reward."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A rollout's reward.

    `value` is the number that the agent returned, or None. With rewards of several roles it is the
    policy's reward, or the mean of all if the policy has no reward. `roles` is empty if the agent
    named no role: then each role has earned `value`. A role with rewards of its `calls`, in their
    order, has earned their sum. Measures are among the roles, and are no reward.
    """

    value: float | None
    roles: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def to_json(self) -> float | JsonObject | None:
        """Return the plain value that `read_reward` reads as this reward."""
        if not self.roles:
            return self.value
        return {**self.roles, **{role: [*rewards] for role, rewards in self.calls.items()}}


def read_reward(value: object) -> Reward:
    """Read the value that an agent returned; RewardError if it is not a reward.

    None and an empty mapping are no reward: a judge gives it, or the agent abstains.
    """
    if value is None or (isinstance(value, Mapping) and not value):
        return Reward(None)
    if (number := read_number(value)) is not None and abs(number) <= LARGEST:
        return Reward(number)
    if not isinstance(value, Mapping):
        raise _no_reward(value)
    roles: dict[str, float] = {}
    calls: dict[str, tuple[float, ...]] = {}
    for role, earned in value.items():
        if isinstance(role, str) and (number := read_number(earned)) is not None:
            roles[role] = number
        elif isinstance(role, str) and (numbers := _read_numbers(earned)) is not None:
            calls[role] = numbers
            roles[role] = math.fsum(numbers)
        else:
            raise _no_reward(value)
    rewards = [number for role, number in roles.items() if not role.startswith(MEASURE)]
    parts = chain(*(of for role, of in calls.items() if not role.startswith(MEASURE)))
    if any(abs(number) > LARGEST for number in (*rewards, *parts)):
        raise _no_reward(value)
    mean = fmean(rewards) if rewards else None
    return Reward(roles.get(POLICY, mean), roles, calls)


def reward_verdict(verdict: Reward, example: Mapping[str, Any]) -> Reward:
    """Reward a trained judge's verdict on two rollouts: 1 if it prefers the rollout named BETTER.

    The reward is 0 if the other rollout has the higher score, and 1/2 if the scores are equal, or
    if the judge says that it was not consistent. A judge that does not score both abstains.
    """
    roles = {name: number for name, number in verdict.roles.items() if name.startswith(MEASURE)}
    shown = [one["id"] for one in example["rollouts"]]
    scores = {one: verdict.roles[one] for one in shown if one in verdict.roles}
    abstains = len(scores) < len(shown)
    roles[f"{MEASURE}abstained"] = float(abstains)
    if abstains:
        return Reward(None, roles)
    ahead = scores.pop(example[BETTER]) - max(scores.values())
    sides = (ahead > 0) - (ahead < 0) if roles.get(f"{MEASURE}consistent", 1.0) else 0
    value = (1 + sides) / 2
    return Reward(value, {POLICY: value, **roles})


def check_reward(reward: Reward) -> None:
    """Refuse a rollout that ended without a reward, and that no judge scores.

    A rollout with measures alone abstains.
    """
    if reward.value is None and not reward.roles:
        raise RewardError(f"the agent returned no reward; {NEEDED}")


def check_roles(reward: Reward, calls: Mapping[str, int]) -> None:
    """Refuse rewards of unknown roles or calls; `calls` is each role's number of answered calls."""
    for role in reward.roles:
        if role not in calls and not role.startswith(MEASURE):
            known = ", ".join(calls)
            raise RewardError(
                f"the agent returned a reward for {role!r}, and what it can reward is: {known}"
            )
    for role, rewards in reward.calls.items():
        answered = calls.get(role, 0)
        if len(rewards) != answered:
            raise RewardError(
                f"the agent returned {len(rewards)} rewards for the calls of the role {role!r}, "
                f"and {answered} were answered; return one for each, or one number for all"
            )


def read_number(value: object) -> float | None:
    """Read a finite real number, or the only element of an array, as a float, or return None.

    The value knows itself how it is a float, so no library of arrays is imported for it.
    """
    try:
        plain = _plain(value)
        is_real = isinstance(plain, Real) or not isinstance(plain, str | Complex)
        number = float(plain) if is_real and isinstance(plain, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch's
        return None
    return number if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    """Return what an array of one element holds, None if that is masked; pass on other values."""
    if hasattr(value, "tolist") and not isinstance(value, Number | Sequence):
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            [value] = value
    return value


def _read_numbers(value: object) -> tuple[float, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    read = [*map(read_number, value)]
    numbers = tuple(number for number in read if number is not None)
    return numbers if len(numbers) == len(read) else None


def _no_reward(value: object) -> RewardError:
    return RewardError(f"the agent returned {value!r:.300} as its reward; {NEEDED}")
