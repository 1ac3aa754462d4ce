"""trajectories → earnings: the discounted return of each call, and what it is compared by."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import pyarrow as pa

from tasks.algorithm.advantages import Earned, Groups
from tasks.storage.tables import arrays
from tasks.trajectories import rewards_by_role


@dataclass(frozen=True)
class TrainedCall:
    """A call of a trained role: its reward, if it has one, its sampled tokens, and its state.

    The state is a hash of the tokens that the call observed.
    """

    reward: float | None
    tokens: int
    state: str


Calls = dict[int, TrainedCall]
"""Number of each call of a role in a rollout, in order → the call."""


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute G_t = r_t + γ G_(t+1) (Sutton and Barto, 2nd edition, equation 3.9)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def earnings_by_role(
    trajectories: pa.Table, discount: float = 1.0, *, by_call: bool = False
) -> dict[str, Groups]:
    """Map role to the earnings of the rollouts in which it is trained and has a reward.

    A reward that is one number is the return of each call of the role. If it is discounted, or if
    other rollouts of the group have rewards for their calls, it is the reward of the last call.
    Without a discount, rewards of calls or `by_call`, all calls have one entry.
    """
    calls = calls_of(trajectories)
    return {
        role: {
            group: _earnings(
                {r: (reward, calls.get((role, r), {})) for r, reward in rewards.items()},
                discount,
                by_call,
            )
            for group, rewards in groups.items()
        }
        for role, groups in rewards_by_role(trajectories).items()
    }


def calls_of(trajectories: pa.Table) -> dict[tuple[str, str], Calls]:
    """Map role and rollout to its calls."""
    columns = ["role", "rollout_id", "call_numbers", "call_tokens", "call_rewards"]
    rows = trajectories.select(columns).to_pylist()
    lists = (arrays(trajectories[name]) for name in ("tokens", "mask"))
    calls: dict[tuple[str, str], Calls] = defaultdict(dict)
    for row, tokens, mask in zip(rows, *lists, strict=True):
        rewards, start = row["call_rewards"] or [None] * len(row["call_numbers"]), 0
        for number, length, reward in zip(
            row["call_numbers"], row["call_tokens"], rewards, strict=True
        ):
            part, sampled = tokens[start : start + length], mask[start : start + length] != 0
            state = sha256(part[~sampled].tobytes()).hexdigest()
            call = TrainedCall(reward, int(sampled.sum()), state)
            calls[row["role"], row["rollout_id"]][number] = call
            start += length
    return {name: dict(sorted(by_number.items())) for name, by_number in calls.items()}


def _earnings(
    rollouts: Mapping[str, tuple[float, Calls]], discount: float, by_call: bool
) -> dict[str, list[Earned]]:
    """Compute the earnings of one group from each rollout's reward and calls."""
    rewarded = any(
        call.reward is not None for _, calls in rollouts.values() for call in calls.values()
    )
    if discount == 1.0 and not rewarded:
        return {
            rollout: _shared(reward, calls, by_call)
            for rollout, (reward, calls) in rollouts.items()
        }
    return {
        rollout: [
            Earned(returned, reward, call.tokens, call.state)
            for call, returned in zip(
                calls.values(),
                returns_to_go(_call_rewards(reward, calls), discount),
                strict=True,
            )
        ]
        for rollout, (reward, calls) in rollouts.items()
    }


def _shared(reward: float, calls: Calls, by_call: bool) -> list[Earned]:
    """Give one reward to all calls of a rollout."""
    if by_call:
        return [Earned(reward, reward, call.tokens, call.state) for call in calls.values()]
    return [Earned(reward, reward, sum(call.tokens for call in calls.values()))]


def _call_rewards(reward: float, calls: Calls) -> list[float]:
    given = [call.reward for call in calls.values() if call.reward is not None]
    return given or [0.0] * (len(calls) - 1) + [reward]
