"""trajectories → earnings: the discounted return of each call, and what it is compared by."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, islice
from math import fsum
from typing import Literal

import numpy as np
import pyarrow as pa

from tasks.algorithm.comparisons import Earned, Groups
from tasks.storage.tables import arrays

Unit = Literal["rollout", "call", "token"]


@dataclass(frozen=True)
class TrainedCall:
    """A call of a trained role: its reward, if it has one, its sampled tokens, and its state.

    The state is a hash of the tokens that the call observed. `penalties` lessen the reward, one for
    each sampled token.
    """

    reward: float | None
    tokens: int
    state: str
    penalties: tuple[float, ...] = ()


Calls = dict[int, TrainedCall]
"""Number of each call of a role in a rollout, in order → the call."""


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute G_t = r_t + γ G_(t+1) (Sutton and Barto, 2nd edition, equation 3.9)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def earnings_by_role(
    calls: Mapping[tuple[str, str], Calls],
    rewards: Mapping[str, Mapping[str, Mapping[str, float]]],
    discount: float = 1.0,
    unit: Unit = "rollout",
) -> dict[str, Groups]:
    """Map role to the earnings of the rollouts in which it is trained and has a reward.

    `calls` are those of `calls_of`, and `rewards` those of `rewards_by_role`. A scalar reward goes
    to the last call if there is a discount, or if other rollouts of the group have rewards for
    their calls; otherwise it is the return of each call of the role. Penalties
    are subtracted from the rewards of their calls. By the unit `rollout`, one entry stands for all
    calls, unless they have rewards or a discount; by `token`, each sampled token has an entry.
    """
    return {
        role: {
            group: _earnings(
                {r: (reward, calls.get((role, r), {})) for r, reward in of_group.items()},
                discount,
                unit,
            )
            for group, of_group in groups.items()
        }
        for role, groups in rewards.items()
    }


def calls_of(
    trajectories: pa.Table, penalties: Sequence[np.ndarray] | None = None
) -> dict[tuple[str, str], Calls]:
    """Map role and rollout to its calls; `penalties` are aligned with the trajectories' tokens."""
    columns = ["role", "rollout_id", "call_numbers", "call_tokens", "call_rewards"]
    rows = trajectories.select(columns).to_pylist()
    lists = (arrays(trajectories[name]) for name in ("tokens", "mask"))
    calls: dict[tuple[str, str], Calls] = defaultdict(dict)
    for place, (row, tokens, mask) in enumerate(zip(rows, *lists, strict=True)):
        rewards, start = row["call_rewards"] or [None] * len(row["call_numbers"]), 0
        for number, length, reward in zip(
            row["call_numbers"], row["call_tokens"], rewards, strict=True
        ):
            part = slice(start, start + length)
            sampled = mask[part] != 0
            state = sha256(tokens[part][~sampled].tobytes()).hexdigest()
            lost = () if penalties is None else (*penalties[place][part][sampled].tolist(),)
            call = TrainedCall(reward, int(sampled.sum()), state, lost)
            calls[row["role"], row["rollout_id"]][number] = call
            start += length
    return {name: dict(sorted(by_number.items())) for name, by_number in calls.items()}


def _earnings(
    rollouts: Mapping[str, tuple[float, Calls]], discount: float, unit: Unit
) -> dict[str, list[Earned]]:
    """Compute the earnings of one group from each rollout's reward and calls."""
    rewarded = any(
        call.reward is not None for _, calls in rollouts.values() for call in calls.values()
    )
    shared = unit == "rollout" and discount == 1.0 and not rewarded
    earn = {"rollout": _earn_by_call, "call": _earn_by_call, "token": _earn_by_token}[unit]
    return {
        rollout: _share(reward, calls) if shared else earn(reward, calls, discount)
        for rollout, (reward, calls) in rollouts.items()
    }


def _share(reward: float, calls: Calls) -> list[Earned]:
    """Let one entry stand for all calls of a rollout."""
    left = reward - _penalty(calls)
    return [Earned(left, left, sum(call.tokens for call in calls.values()))]


def _earn_by_call(reward: float, calls: Calls, discount: float) -> list[Earned]:
    """Compute the earnings of each call."""
    left = reward - _penalty(calls)
    return [
        Earned(returned, left, call.tokens, call.state)
        for call, returned in zip(calls.values(), _returns(reward, calls, discount), strict=True)
    ]


def _earn_by_token(reward: float, calls: Calls, discount: float) -> list[Earned]:
    """Compute the earnings of each sampled token: its call's, without the penalties before it."""
    left = reward - _penalty(calls)
    return [
        Earned(returned + before, left, 1, call.state)
        for call, returned in zip(calls.values(), _returns(reward, calls, discount), strict=True)
        for before in islice(accumulate(call.penalties, initial=0.0), call.tokens)
    ]


def _returns(reward: float, calls: Calls, discount: float) -> list[float]:
    """Compute the return from each call on."""
    given = [call.reward for call in calls.values() if call.reward is not None]
    rewards = given or [0.0] * (len(calls) - 1) + [reward]
    left = [
        value - fsum(call.penalties) for value, call in zip(rewards, calls.values(), strict=True)
    ]
    return returns_to_go(left, discount)


def _penalty(calls: Calls) -> float:
    return fsum(penalty for call in calls.values() for penalty in call.penalties)
