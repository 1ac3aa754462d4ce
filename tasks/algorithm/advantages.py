"""The table of advantages: what the returns of a step's calls become. All functions are pure.

An advantage is a row of ADVANTAGES. Most compare within a group: the n-th call of a rollout with
the n-th calls of the group's other rollouts, since a baseline may depend on time, but not on what
is sampled (Williams, 1992). Others compare over the whole step, or with the steps before it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import exp, fsum, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from tasks.algorithm.divergences import Penalty
from tasks.algorithm.settings import Known, Number, Option, Settings, complete_settings, find_row

Aggregation = Literal["sum", "token_mean", "rollout_mean", "rollout_sum", "fixed"]


@dataclass(frozen=True)
class Earned:
    """Earnings of a call: the return from it on, and what else an advantage may compare by.

    Where the calls of a rollout share one reward, one of these may stand for all of them.
    `reward` is the rollout's, `tokens` how many were sampled, and `state` what the call observed.
    """

    returned: float
    reward: float
    tokens: int = 1
    state: str = ""


Groups = Mapping[str, Mapping[str, Sequence[Earned]]]
"""Group → rollout → its calls in order, or one for all of them."""

Advantages = dict[str, list[float]]
"""Rollout → the advantages of its calls."""

History = Sequence[float]
"""Mean reward of a role in each earlier step in which it had one, in order."""

Estimator = Callable[[Groups, Settings, History], Advantages]
Comparison = Callable[[Sequence[float], Settings], list[float]]


@dataclass(frozen=True)
class Advantage:
    """A row of the table.

    `in_groups` is whether a group's advantages depend on no other group, `by_call` whether calls
    are told apart even if they share one reward, and `by_token` whether a call's tokens are, if
    rewards have a penalty for each: then each token stands as a call does. `by_history` is whether
    it reads the history of the role.
    """

    formula: str
    source: str
    estimate: Estimator
    settings: Known = field(default_factory=dict[str, Number | Option])
    in_groups: bool = True
    by_call: bool = False
    by_token: bool = False
    by_history: bool = False


@dataclass(frozen=True)
class CreditAssignment:
    """Method by which rewards become the advantages of sampled tokens.

    `discount` is γ of the returns of calls, `advantage` a name of ADVANTAGES, and `aggregation`
    the factor of each datum's loss (`tasks.datums.build`), with its `divisor` if it is `fixed`. A
    group with fewer than `min_group_size` rollouts to train on is left out, and so is what has no
    advantage, unless the loss is `regularized`. `penalty` is for divergence from a reference, and
    `entropy_coefficient` times -log q, which estimates the entropy, is added to the advantage of
    each sampled token: in expectation this is the entropy's gradient (Williams and Peng, 1991).
    """

    advantage: str
    aggregation: Aggregation = "sum"
    min_group_size: int = 1
    discount: float = 1.0
    advantage_settings: Settings = field(default_factory=dict[str, float | str])
    divisor: float | None = None
    regularized: bool = False
    penalty: Penalty | None = None
    entropy_coefficient: float = 0.0


def is_uniform(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal, so that a group's comparison teaches nothing."""
    return min(rewards) == max(rewards)


def centred(returns: Sequence[float], _: Settings) -> list[float]:
    """Subtract the mean."""
    if is_uniform(returns):  # exactly zero, which r - mean need not be: fmean([.1, .1, .1]) > .1
        return [0.0] * len(returns)
    mean = fmean(returns)
    return [value - mean for value in returns]


def standardized(returns: Sequence[float], settings: Settings) -> list[float]:
    """Divide the centred returns by their unbiased deviation (n - 1), without an epsilon.

    TRL, verl and Trinity take this deviation too, so that their learning rates carry over. If it
    is at most `threshold`, every advantage is 0.
    """
    apart = centred(returns, settings)
    if is_uniform(returns) or (deviation := stdev(returns)) <= float(settings["threshold"]):
        return [0.0] * len(returns)
    return [value / deviation for value in apart]


def leave_one_out(returns: Sequence[float], settings: Settings) -> list[float]:
    """Subtract the mean of the others: n / (n - 1) times `centred`."""
    count = len(returns)
    apart = centred(returns, settings)
    return [value * count / (count - 1) if value else 0.0 for value in apart]


def uncompared(returns: Sequence[float], _: Settings) -> list[float]:
    """Return the returns as they are."""
    return list(returns)


def opmd(returns: Sequence[float], settings: Settings) -> list[float]:
    """Subtract the mean, or the log-mean-exp at temperature τ: τ log(mean(exp(r / τ)))."""
    if settings["baseline"] == "mean" or is_uniform(returns):
        return centred(returns, settings)
    tau, most = float(settings["tau"]), max(returns)
    baseline = most + tau * log(fmean(exp((value - most) / tau) for value in returns))
    return [value - baseline for value in returns]


def asymre(returns: Sequence[float], settings: Settings) -> list[float]:
    """Subtract the mean and a shift, which weighs successes more than failures if negative."""
    shift = float(settings["shift"])
    return [value - shift for value in centred(returns, settings)]


def maxrl(returns: Sequence[float], settings: Settings) -> list[float]:
    """Divide the centred returns by the mean, the group's rate of success if rewards are 0 and 1.

    A group without a positive mean teaches nothing.
    """
    mean = fmean(returns)
    if mean <= 0:
        return [0.0] * len(returns)
    return [value / mean for value in centred(returns, settings)]


def compare_calls(compare: Comparison) -> Estimator:
    """Make an estimator that compares the n-th calls of each group."""

    def estimate(groups: Groups, settings: Settings, _: History) -> Advantages:
        advantages: Advantages = {name: [] for group in groups.values() for name in group}
        for group in groups.values():
            for call in range(max(map(len, group.values()), default=0)):
                returns = {name: of[call].returned for name, of in group.items() if call < len(of)}
                for name, value in zip(
                    returns, compare([*returns.values()], settings), strict=True
                ):
                    advantages[name].append(value)
        return advantages

    return estimate


def standardize_over_step(groups: Groups, *_: object) -> Advantages:
    """Divide each group's centred returns by the unbiased deviation of all the step's returns."""
    returns = [call.returned for call in _calls(groups)]
    if is_uniform(returns):
        return {name: [0.0] * len(of) for name, of in _rollouts(groups)}
    deviation = stdev(returns)
    apart = compare_calls(centred)(groups, {}, ())
    return {name: [value / deviation for value in of] for name, of in apart.items()}


def rebn(groups: Groups, *_: object) -> Advantages:
    """Standardize the returns of all the step's calls: (G - mean) / deviation."""
    return _whiten(groups, lambda _: 1)


def reinforce_plus_plus(groups: Groups, *_: object) -> Advantages:
    """Standardize the returns of all the step's tokens, each with the return of its call."""
    return _whiten(groups, lambda call: call.tokens)


def step_grpo(groups: Groups, settings: Settings, _: History) -> Advantages:
    """Standardize the rollouts' rewards, and give each call its rollout's advantage or a share."""
    shares = settings["spread"] == "divide"
    advantages: Advantages = {}
    for group in groups.values():
        rewards = [calls[0].reward for calls in group.values()]
        for (name, calls), value in zip(
            group.items(), standardized(rewards, {"threshold": 0.0}), strict=True
        ):
            advantages[name] = [value / (len(calls) if shares else 1)] * len(calls)
    return advantages


def gigpo(groups: Groups, settings: Settings, _history: History) -> Advantages:
    """Add to the rollout's advantage ω times its calls', compared where they observed the same.

    Both are centred or, with `deviation` group, standardized.
    """
    weight = float(settings["omega"])
    compare = {"none": centred, "group": standardized}[str(settings["deviation"])]
    advantages: Advantages = {}
    for group in groups.values():
        rewards = [calls[0].reward for calls in group.values()]
        whole = dict(zip(group, compare(rewards, {"threshold": 0.0}), strict=True))
        for name, calls in group.items():
            advantages[name] = [whole[name]] * len(calls)
        states: dict[str, list[tuple[str, int, float]]] = defaultdict(list)
        for name, calls in group.items():
            for place, call in enumerate(calls):
                states[call.state].append((name, place, call.returned))
        for met in states.values():
            apart = compare([returned for *_, returned in met], {"threshold": 0.0})
            for (name, place, _), value in zip(met, apart, strict=True):
                advantages[name][place] += weight * value
    return advantages


def running_mean(groups: Groups, settings: Settings, history: History) -> Advantages:
    """Subtract from a rollout's reward the running mean of its role's rewards in earlier steps.

    With m_k the mean reward of step k, the baseline of step s is Σ d^(s-1-k) m_k / Σ d^(s-1-k) over
    k < s: the exponential moving average of decay d, corrected for its bias to where it starts. By
    decay 0 it is the last step's mean, by 1 the mean of all earlier steps. SPIRAL updates its
    average by each rollout and starts from 0, which an average of steps would leave too slowly.

    A role without history, as in step 0, has the mean of its own step: a baseline of 0 would
    reinforce whatever that step sampled. The earlier rewards are without penalties.
    """
    rewards = {name: calls[0].reward for name, calls in _rollouts(groups)}
    if history:
        baseline = _moving_average(history, float(settings["decay"]))
        apart = [reward - baseline for reward in rewards.values()]
    else:
        apart = centred([*rewards.values()], settings)
    values = dict(zip(rewards, apart, strict=True))
    return {name: [values[name]] * len(calls) for name, calls in _rollouts(groups)}


def _moving_average(values: Sequence[float], decay: float) -> float:
    """Average values by weights that fall by the decay from the last value to the first."""
    mean = weight = 0.0
    for value in values:
        weight = decay * weight + 1
        mean += (value - mean) / weight
    return mean


def _whiten(groups: Groups, weigh: Callable[[Earned], int]) -> Advantages:
    """Standardize the returns of a step, each counted as often as its weight, unbiased."""
    calls = [(call.returned, weigh(call)) for call in _calls(groups)]
    count = sum(weight for _, weight in calls)
    if is_uniform([returned for returned, _ in calls]):
        return {name: [0.0] * len(of) for name, of in _rollouts(groups)}
    mean = fsum(returned * weight for returned, weight in calls) / count
    squares = fsum((returned - mean) ** 2 * weight for returned, weight in calls)
    deviation = sqrt(squares / (count - 1))
    return {
        name: [(call.returned - mean) / deviation for call in of] for name, of in _rollouts(groups)
    }


def _rollouts(groups: Groups) -> Iterator[tuple[str, Sequence[Earned]]]:
    return chain.from_iterable(group.items() for group in groups.values())


def _calls(groups: Groups) -> list[Earned]:
    return [call for _, calls in _rollouts(groups) for call in calls]


ADVANTAGES: Mapping[str, Advantage] = {
    "centred": Advantage("r - mean", "arXiv:2503.20783", compare_calls(centred)),
    "standardized": Advantage(
        "(r - mean) / deviation",
        "arXiv:2402.03300",
        compare_calls(standardized),
        {"threshold": Number(0.0, 0)},
    ),
    "standardized_over_step": Advantage(
        "(r - mean) / deviation of the step's rewards",
        "arXiv:2508.08221",
        standardize_over_step,
        in_groups=False,
    ),
    "leave_one_out": Advantage(
        "r - mean of the others", "arXiv:2402.14740", compare_calls(leave_one_out)
    ),
    "none": Advantage("r", "Williams, 1992", compare_calls(uncompared)),
    "opmd": Advantage(
        "r - mean, or r - τ log(mean(exp(r / τ)))",
        "arXiv:2505.17826",
        compare_calls(opmd),
        {
            "baseline": Option("mean", ("mean", "log_mean_exp")),
            "tau": Number(1.0, 1e-3, used_by=("baseline", ("log_mean_exp",))),
        },
    ),
    "asymre": Advantage(
        "r - (mean + shift)",
        "arXiv:2506.20520",
        compare_calls(asymre),
        {"shift": Number(-0.1)},
    ),
    "maxrl": Advantage("(r - mean) / mean", "arXiv:2602.02710", compare_calls(maxrl)),
    "reinforce_plus_plus": Advantage(
        "(G - mean) / deviation, over the step's tokens",
        "arXiv:2501.03262",
        reinforce_plus_plus,
        in_groups=False,
        by_token=True,
    ),
    "rebn": Advantage(
        "(G - mean) / deviation, over the step's calls",
        "arXiv:2510.01051",
        rebn,
        in_groups=False,
        by_call=True,
    ),
    "step_grpo": Advantage(
        "(r - mean) / deviation of the rollouts, to each call whole or divided",
        "Trinity-RFT 0.6.0",
        step_grpo,
        {"spread": Option("copy", ("copy", "divide"))},
        by_call=True,
    ),
    "gigpo": Advantage(
        "A of the rollout + ω A of the call, among calls that observed the same",
        "arXiv:2505.10978",
        gigpo,
        {"omega": Number(1.0, 0), "deviation": Option("none", ("none", "group"))},
        by_call=True,
    ),
    "running_mean": Advantage(
        "r - moving average of the role's mean rewards in earlier steps",
        "arXiv:2506.24119",
        running_mean,
        {"decay": Number(0.95, 0, 1)},
        in_groups=False,
        by_history=True,
    ),
}


ENTROPIES = (
    "needs the entropy of the whole distribution at each token, which the Tinker API does not "
    "give; give standardized with the loss ppo"
)
REFUSED = {
    "gae": "needs a value network, which a Tinker service does not have; give rebn, which compares "
    "returns over the step, or leave_one_out",
    "clip_b": ENTROPIES,
    "clip_v": ENTROPIES,
}
"""Advantage of the field → why it is not in the table, and what to use instead."""


def find_advantage(name: str) -> Advantage:
    """Return the row of an advantage; ValueError if there is none."""
    return find_row("advantage", name, ADVANTAGES, REFUSED)


def check_advantage(name: str, settings: Settings) -> None:
    """Refuse (ValueError) an unknown advantage, and a setting that it would ignore."""
    complete_settings(f"the advantage {name}", settings, find_advantage(name).settings)


def estimate_advantages(
    groups: Groups, name: str, settings: Settings, history: History = ()
) -> Advantages:
    """Estimate the advantages of a step's calls; ValueError for a reward that is not finite."""
    for rollout, calls in _rollouts(groups):
        for call in calls:
            _check_finite(rollout, call.returned)
    row = find_advantage(name)
    complete = complete_settings(f"the advantage {name}", settings, row.settings)
    return row.estimate(groups, complete, history) if groups else {}


def _check_finite(rollout: str, reward: float) -> None:
    if not isfinite(reward):
        raise ValueError(
            f"rollout {rollout} has the reward {reward}: a reward must be a finite number; "
            "let the agent raise instead, and the rollout counts as failed"
        )
