"""rewards → credit: what comparing rewards gives each sampled token of a role's calls."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, islice
from math import fsum
from typing import Literal

import numpy as np
import pyarrow as pa

from ratchet.tasks.algorithm.advantages import (
    Earned,
    estimate_advantages,
    find_advantage,
    rollouts_of,
)
from ratchet.tasks.algorithm.divergences import find_estimator
from ratchet.tasks.scoring import reference_logprobs
from ratchet.tasks.settings.algorithm import CreditAssignment, Penalty
from ratchet.tasks.storage.tables import arrays, flat_values

CreditUnit = Literal["rollout", "call", "token"]


@dataclass(frozen=True)
class TrainedCall:
    """A call of a trained role: a row of the table that assigns credit.

    `reward` is the call's own, if it has one. `sampled` has the indices of its sampled tokens among
    the tokens of all trajectories; its `penalties`, one a sampled token, lessen the
    reward. `state` is a hash of the tokens that the call observed.
    """

    number: int
    reward: float | None
    state: str
    sampled: np.ndarray
    penalties: Sequence[float] = ()


Calls = Mapping[tuple[str, str], Sequence[TrainedCall]]
"""Role and rollout → the calls of the role in the rollout, in order."""

RewardedCalls = tuple[float, Sequence[TrainedCall]]
"""Reward of a role in a rollout, and the role's calls there."""


@dataclass(frozen=True)
class Credit:
    """Trajectories that are compared with others, and what each of their tokens earned.

    `compared` is what the comparison gave, 0 where a token was not sampled; `advantages` has the
    penalties and the entropy bonus as well. `references` has the log-probabilities that a penalty
    in the loss reads, if there is one. All three are lists of arrays of shape [tokens].
    """

    trajectories: pa.Table
    masks: list[np.ndarray]
    compared: list[np.ndarray]
    advantages: list[np.ndarray]
    references: list[np.ndarray] | None = None


def assign_credit(
    trajectories: pa.Table,
    rewards: pa.Table,
    credit: CreditAssignment,
    references: Mapping[str, pa.Table],
) -> Credit:
    """Assign credit to the tokens of all trajectories but those of groups that are too small.

    In the reward, the penalties of a call's tokens are subtracted from the call's reward; in the
    advantage, each token's own from its advantage. The entropy coefficient times -log q, which
    estimates the entropy, is added to the advantage of each sampled token: in expectation this is
    the entropy's gradient (Williams and Peng, 1991).
    """
    algorithm = credit.algorithm
    penalties = [
        (one, _of_tokens(trajectories, one, references))
        for one in algorithm.penalties()
        if one.placement != "loss"
    ]
    lost = [own for penalty, own in penalties if penalty.placement == "reward" and own]
    in_reward = np.sum([*map(np.concatenate, lost)], axis=0) if lost else None
    masks = arrays(trajectories["mask"])
    named, all_compared = compare_rewards(calls_of(trajectories, in_reward), rewards, credit, masks)
    names = zip(*(trajectories[name].to_pylist() for name in ("role", "rollout_id")), strict=True)
    kept = [index for index, name in enumerate(names) if name in named]
    masks, compared = [masks[index] for index in kept], [all_compared[index] for index in kept]
    advantages = compared
    for penalty, of_tokens in penalties:
        if penalty.placement == "advantage":
            own = [of_tokens[index] for index in kept]
            advantages = [value - less for value, less in zip(advantages, own, strict=True)]
    in_loss = None
    if algorithm.kl.in_loss:
        scored = _scored(trajectories, algorithm.kl, references)
        in_loss = [scored[index] for index in kept]
    trajectories = trajectories.take(pa.array(kept, pa.int64()))
    if algorithm.entropy_coefficient:
        logprobs = arrays(trajectories["logprobs"])
        advantages = [
            value - algorithm.entropy_coefficient * np.where(mask != 0, log_q, 0.0)
            for value, log_q, mask in zip(advantages, logprobs, masks, strict=True)
        ]
    if algorithm.trained_calls is not None:
        masks = _draw_calls(trajectories, masks, algorithm.trained_calls, credit.seed)
        advantages = [value * mask for value, mask in zip(advantages, masks, strict=True)]
    return Credit(trajectories, masks, compared, advantages, in_loss)


def calls_of(trajectories: pa.Table, penalties: np.ndarray | None = None) -> Calls:
    """List the calls of the trajectories; `penalties` are of the tokens of all trajectories."""
    columns = ["role", "rollout_id", "call_numbers", "call_tokens", "call_rewards"]
    tokens, mask = flat_values(trajectories["tokens"]), flat_values(trajectories["mask"])
    calls: dict[tuple[str, str], list[TrainedCall]] = defaultdict(list)
    end = 0
    for row in trajectories.select(columns).to_pylist():
        rewards = row["call_rewards"] or [None] * len(row["call_numbers"])
        for number, length, reward in zip(
            row["call_numbers"], row["call_tokens"], rewards, strict=True
        ):
            start, end = end, end + length
            sampled = start + np.flatnonzero(mask[start:end])
            observed = tokens[start:end][mask[start:end] == 0]
            lost = () if penalties is None else penalties[sampled].tolist()
            state = sha256(observed.tobytes()).hexdigest()
            call = TrainedCall(number, reward, state, sampled, lost)
            calls[row["role"], row["rollout_id"]].append(call)
    return {name: sorted(of, key=lambda call: call.number) for name, of in calls.items()}


def compare_rewards(
    calls: Calls, rewards: pa.Table, credit: CreditAssignment, masks: Sequence[np.ndarray]
) -> tuple[set[tuple[str, str]], list[np.ndarray]]:
    """Compare the rewards of each group that is not too small, role by role.

    Returns the roles and rollouts that earned advantages, and the advantage of each token of each
    trajectory, whose `masks` are given: 0 where a token was not sampled.
    """
    algorithm = credit.algorithm
    row = find_advantage(algorithm.advantage)
    by_token = row.by_token and any(one.placement == "reward" for one in algorithm.penalties())
    unit = "token" if by_token else "call" if row.by_call else "rollout"
    groups: dict[tuple[str, str], dict[str, RewardedCalls]] = defaultdict(dict)
    for given in rewards.to_pylist():
        role, rollout = given["role"], given["rollout_id"]
        groups[role, given["group_id"]][rollout] = given["reward"], calls[role, rollout]
    compared = set[tuple[str, str]]()
    ends = np.cumsum([len(mask) for mask in masks], dtype=int)
    values = np.zeros(ends[-1] if masks else 0)
    for role in rewards["role"].unique().to_pylist():
        earned = {
            group: group_earnings(rollouts, algorithm.discount, unit)
            for (of_role, group), rollouts in groups.items()
            if of_role == role and len(rollouts) >= credit.min_group_size
        }
        advantages = estimate_advantages(earned, algorithm.advantage, algorithm.advantage_settings)
        for rollout, entries in rollouts_of(earned):
            counts = [entry.tokens for entry in entries]
            sampled = np.concatenate([call.sampled for call in calls[role, rollout]])
            values[sampled] = np.repeat(advantages[rollout], counts)
            compared.add((role, rollout))
    return compared, np.split(values, ends[:-1])


def group_earnings(
    rollouts: Mapping[str, RewardedCalls], discount: float = 1.0, unit: CreditUnit = "rollout"
) -> dict[str, list[Earned]]:
    """Compute the earnings of a role in each rollout of a group.

    A scalar reward goes to the last call if there is a discount, or if other rollouts of the group
    have rewards for their calls; otherwise it is the return of each call of the role. Penalties are
    subtracted from the rewards of their calls. By the unit `rollout`, one entry stands for all
    calls, unless they have rewards or a discount; by `token`, each sampled token has an entry: its
    call's, without the penalties before it.
    """
    rewarded = any(call.reward is not None for _, calls in rollouts.values() for call in calls)
    if unit == "rollout" and (rewarded or discount != 1.0):
        unit = "call"
    earned: dict[str, list[Earned]] = {}
    for name, (reward, calls) in rollouts.items():
        left = reward - fsum(penalty for call in calls for penalty in call.penalties)
        if unit == "rollout":
            earned[name] = [Earned(left, left, sum(len(call.sampled) for call in calls))]
            continue
        given = [call.reward for call in calls if call.reward is not None]
        rewards = given or [0.0] * (len(calls) - 1) + [reward]
        lessened = [one - fsum(call.penalties) for one, call in zip(rewards, calls, strict=True)]
        returns = zip(calls, returns_to_go(lessened, discount), strict=True)
        if unit == "call":
            earned[name] = [Earned(g, left, len(call.sampled), call.state) for call, g in returns]
            continue
        earned[name] = [
            Earned(g + before, left, 1, call.state)
            for call, g in returns
            for before in islice(accumulate(call.penalties, initial=0.0), len(call.sampled))
        ]
    return earned


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute G_t = r_t + γ G_(t+1) (Sutton and Barto, 2nd edition, equation 3.9)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def _draw_calls(
    trajectories: pa.Table, masks: Sequence[np.ndarray], count: int, seed: int
) -> list[np.ndarray]:
    """Return the masks with `count` of all calls: the calls with the smallest hashes."""
    names = ("rollout_id", "call_numbers", "call_tokens")
    rows = [*zip(*(trajectories[name].to_pylist() for name in names), strict=True)]
    calls = [(rollout, number) for rollout, numbers, _ in rows for number in numbers]

    def chance(call: tuple[str, int]) -> bytes:
        return sha256(f"{seed} {call[0]} {call[1]}".encode()).digest()

    drawn = {*sorted(calls, key=chance)[:count]}
    return [
        mask * np.repeat([(rollout, number) in drawn for number in numbers], lengths)
        for (rollout, numbers, lengths), mask in zip(rows, masks, strict=True)
    ]


def penalties_of(
    penalty: Penalty, log_q: np.ndarray, log_ref: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Compute the penalties of a trajectory, 0 where a token was not sampled: [tokens]."""
    d = np.where(mask != 0, log_ref.astype(np.float64) - log_q, 0.0)
    estimates = find_estimator(penalty.estimator).estimate(d, penalty.beta)
    return np.where(mask != 0, penalty.coefficient * estimates, 0.0)


def _of_tokens(
    trajectories: pa.Table, penalty: Penalty, references: Mapping[str, pa.Table]
) -> list[np.ndarray]:
    """Compute a penalty of each trajectory's tokens, by the log-probabilities of its source."""
    of_reference = _scored(trajectories, penalty, references)
    lists = (arrays(trajectories[name]) for name in ("logprobs", "mask"))
    return [
        penalties_of(penalty, log_q, log_ref, mask)
        for log_ref, log_q, mask in zip(of_reference, *lists, strict=True)
    ]


def _scored(
    trajectories: pa.Table, penalty: Penalty, references: Mapping[str, pa.Table]
) -> list[np.ndarray]:
    if penalty.source not in references:
        raise ValueError(f"a penalty of the algorithm needs the {penalty.source} of the step")
    return reference_logprobs(references[penalty.source], trajectories)
