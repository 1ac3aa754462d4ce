"""Rewards of one group → advantages. All functions are pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Literal

Normalise = Literal["none", "tokens", "rollouts"]

Estimator = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True)
class CreditAssignment:
    """Method by which rewards become the advantages of sampled tokens.

    `discount` is γ of the returns of calls, `advantage` a name of ADVANTAGES, and `normalise` the
    scale of a step's advantages (`tasks.datums.build`). A group with fewer than `min_group_size`
    rollouts to train on is left out.
    """

    advantage: str
    normalise: Normalise = "none"
    min_group_size: int = 1
    discount: float = 1.0


def is_uniform(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal, so that every advantage is 0."""
    return min(rewards) == max(rewards)


def centred(rewards: Sequence[float]) -> list[float]:
    """Subtract the group's mean: r_i - mean (Dr. GRPO, arXiv:2503.20783)."""
    if is_uniform(rewards):  # exactly zero, which r - mean need not be: fmean([.1, .1, .1]) > .1
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def standardized(rewards: Sequence[float]) -> list[float]:
    """Standardize: (r_i - mean) / deviation (GRPO, arXiv:2402.03300).

    The deviation is the unbiased one (n - 1), as in TRL, verl and Trinity, so that their learning
    rates carry over. No epsilon is added to it.
    """
    if is_uniform(rewards):
        return [0.0] * len(rewards)
    deviation = stdev(rewards)
    return [advantage / deviation for advantage in centred(rewards)]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Subtract the mean of the others (RLOO, arXiv:2402.14740): n / (n - 1) times `centred`."""
    count = len(rewards)
    return [advantage * count / (count - 1) if advantage else 0.0 for advantage in centred(rewards)]


ADVANTAGES: dict[str, Estimator] = {
    "centred": centred,
    "standardized": standardized,
    "leave_one_out": leave_one_out,
}


def find_advantage(name: str) -> Estimator:
    """Return the function of an advantage; ValueError if there is none."""
    if name not in ADVANTAGES:
        raise ValueError(f"no advantage '{name}' (there is: {', '.join(ADVANTAGES)})")
    return ADVANTAGES[name]


def advantages_of(
    groups: Mapping[str, Mapping[str, float | None]], estimator: str
) -> dict[str, float]:
    """Map group → rollout → reward to rollout → advantage.

    A rollout without a reward is not in its group: it gets no advantage and enters no baseline.
    """
    estimate = find_advantage(estimator)
    advantages: dict[str, float] = {}
    for group in groups.values():
        rewards = {rollout: reward for rollout, reward in group.items() if reward is not None}
        _check_finite(rewards)
        if rewards:
            advantages.update(zip(rewards, estimate(list(rewards.values())), strict=True))
    return advantages


def advantages_by_call(
    group: Mapping[str, Sequence[float]], estimator: str
) -> dict[str, list[float]]:
    """Map rollout → returns of its calls, in one group, to rollout → advantages of its calls.

    The n-th call is compared with the n-th calls of the other rollouts: a baseline may depend on
    time, not on what is sampled (Williams 1992). A call without a counterpart has the advantage 0.
    """
    advantages: dict[str, list[float]] = {rollout: [] for rollout in group}
    for call in range(max(map(len, group.values()), default=0)):
        returns = {rollout: of[call] for rollout, of in group.items() if call < len(of)}
        for rollout, advantage in advantages_of({"": returns}, estimator).items():
            advantages[rollout].append(advantage)
    return advantages


def _check_finite(rewards: Mapping[str, float]) -> None:
    for rollout, reward in rewards.items():
        if not isfinite(reward):
            raise ValueError(
                f"rollout {rollout} has the reward {reward}: a reward must be a finite number; "
                "let the agent raise instead, and the rollout counts as failed"
            )
