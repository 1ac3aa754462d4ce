"""Rewards of one group → advantages. Pure: no files, no clock, no network."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import fmean, stdev

Estimator = Callable[[Sequence[float]], list[float]]


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal: such a group, or a lone rollout, teaches nothing."""
    return min(rewards) == max(rewards)


def centred(rewards: Sequence[float]) -> list[float]:
    """REINFORCE with the group's mean as baseline (Dr. GRPO): r_i - mean."""
    if is_uniform(rewards):  # exactly zero, which r - mean need not be: fmean([.1, .1, .1]) > .1
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def standardized(rewards: Sequence[float]) -> list[float]:
    """GRPO: (r_i - mean) / deviation, with the unbiased (n - 1) deviation.

    Unbiased as in TRL, verl and Trinity, so that their learning rates carry over; the population's
    would be larger by sqrt(n / (n - 1)): 7 % at a group of 8. No epsilon is added to the deviation.
    """
    if is_uniform(rewards):
        return [0.0] * len(rewards)
    deviation = stdev(rewards)
    return [advantage / deviation for advantage in centred(rewards)]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """RLOO: each reward less the mean of the others, which is n / (n - 1) times centred."""
    count = len(rewards)
    return [advantage * count / (count - 1) if advantage else 0.0 for advantage in centred(rewards)]


ADVANTAGES: dict[str, Estimator] = {
    "centred": centred,
    "standardized": standardized,
    "leave_one_out": leave_one_out,
}


def advantages_of(
    groups: Mapping[str, Mapping[str, float | None]], estimator: str
) -> dict[str, float]:
    """Group → rollout → reward becomes rollout → advantage.

    A rollout without a reward is not in its group: it has no advantage, and no other rollout's
    baseline knows of it.
    """
    if estimator not in ADVANTAGES:
        raise ValueError(f"no advantage '{estimator}' (there is: {', '.join(ADVANTAGES)})")
    estimate = ADVANTAGES[estimator]
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
    """Rollout → the returns of its calls, of one group, becomes rollout → their advantages.

    The n-th call is compared with the n-th of the other rollouts, as far as they came to one: a
    baseline may depend on time (Williams 1992), not on what is sampled. One that a single rollout
    came to has the advantage 0. Of one return each this is `advantages_of`.
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
