"""The table of advantages: what the returns of a step's calls become, and the credit of tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import exp, fsum, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Literal, cast

from ratchet.tasks.algorithm.settings import (
    ANY,
    Known,
    NotedSettings,
    Number,
    Option,
    OwnFunctionError,
    Settings,
    calling,
    complete_settings,
    find_own,
    find_row,
    is_as_bound,
    is_own,
)


@dataclass(frozen=True)
class Earned:
    """Earnings of a call, or of all calls of a rollout if they share one reward.

    `returned` is the return from the call on, `reward` the rollout's reward, `tokens` the number of
    sampled tokens, and `state` a hash of what the call observed.
    """

    returned: float
    reward: float
    tokens: int = 1
    state: str = ""


Rollouts = Mapping[str, Sequence[Earned]]
"""Rollout → its calls in order, or one entry for all its calls."""

Groups = Mapping[str, Rollouts]
"""Group → its rollouts."""

Advantages = dict[str, list[float]]
"""Rollout → the advantages of its calls."""


AdvantageEstimator = Callable[[Groups, Settings], Advantages]
Comparison = Callable[[Sequence[float], Settings], list[float]]

ROUNDING = 1e-9
"""Part of the largest reward by which equal rewards may differ, such as 0.6 and 3 * 0.2."""


def is_uniform(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal but for rounding, so that no centred reward teaches."""
    least, most = min(rewards), max(rewards)
    return most - least <= ROUNDING * max(abs(least), abs(most))


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
    if is_uniform(returns) or (deviation := stdev(returns)) <= float(settings["threshold"]):
        return [0.0] * len(returns)
    return [value / deviation for value in centred(returns, settings)]


def leave_one_out(returns: Sequence[float], settings: Settings) -> list[float]:
    """Subtract the mean of the others: n / (n - 1) times `centred`."""
    count, differences = len(returns), centred(returns, settings)
    return [value * count / (count - 1) if value else 0.0 for value in differences]


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

    Without a positive mean, the advantages of the group are 0.
    """
    mean = fmean(returns)
    if mean <= 0:
        return [0.0] * len(returns)
    return [value / mean for value in centred(returns, settings)]


def compare_calls(compare: Comparison) -> AdvantageEstimator:
    """Make an estimator that compares the n-th calls of each group."""

    def estimate(groups: Groups, settings: Settings) -> Advantages:
        advantages: Advantages = {name: [] for group in groups.values() for name in group}
        for group in groups.values():
            for call in range(max(map(len, group.values()), default=0)):
                returns = {name: of[call].returned for name, of in group.items() if call < len(of)}
                compared = compare([*returns.values()], settings)
                for name, value in zip(returns, compared, strict=True):
                    advantages[name].append(value)
        return advantages

    return estimate


def standardize_over_step(groups: Groups, _: Settings) -> Advantages:
    """Divide each group's centred returns by the unbiased deviation of all the step's returns."""
    returns = [call.returned for call in _calls(groups)]
    if is_uniform(returns):
        return {name: [0.0] * len(of) for name, of in rollouts_of(groups)}
    deviation = stdev(returns)
    differences = compare_calls(centred)(groups, {})
    return {name: [value / deviation for value in of] for name, of in differences.items()}


def rebn(groups: Groups, _: Settings) -> Advantages:
    """Standardize the returns of all the step's calls: (G - mean) / deviation."""
    return _whiten(groups, lambda _: 1)


def reinforce_plus_plus(groups: Groups, _: Settings) -> Advantages:
    """Standardize the returns of all the step's tokens, each with the return of its call."""
    return _whiten(groups, lambda call: call.tokens)


def step_grpo(groups: Groups, settings: Settings) -> Advantages:
    """Standardize the rollouts' rewards, and give each call its rollout's advantage or a share."""
    shares = settings["spread"] == "divide"
    advantages: Advantages = {}
    for group in groups.values():
        for (name, calls), value in _compare_rollouts(group, standardized):
            advantages[name] = [value / (len(calls) if shares else 1)] * len(calls)
    return advantages


def gigpo(groups: Groups, settings: Settings) -> Advantages:
    """Add ω times the advantage among calls of equal state to the advantage of the rollout.

    Both are centred or, with `deviation` group, standardized.
    """
    weight = float(settings["omega"])
    compare = {"none": centred, "group": standardized}[str(settings["deviation"])]
    advantages: Advantages = {}
    for group in groups.values():
        states: dict[str, list[tuple[str, int, float]]] = defaultdict(list)
        for (name, calls), value in _compare_rollouts(group, compare):
            advantages[name] = [value] * len(calls)
            for number, call in enumerate(calls):
                states[call.state].append((name, number, call.returned))
        for same in states.values():
            compared = compare([returned for *_, returned in same], {"threshold": 0.0})
            for (name, number, _), value in zip(same, compared, strict=True):
                advantages[name][number] += weight * value
    return advantages


def _compare_rollouts(
    group: Rollouts, compare: Comparison
) -> Iterator[tuple[tuple[str, Sequence[Earned]], float]]:
    """Yield each rollout of a group, with its calls, and the comparison of its reward."""
    rewards = [calls[0].reward for calls in group.values()]
    return zip(group.items(), compare(rewards, {"threshold": 0.0}), strict=True)


def _whiten(groups: Groups, weigh: Callable[[Earned], int]) -> Advantages:
    """Standardize the returns of a step, each counted as often as its weight, unbiased."""
    calls = [(call.returned, weigh(call)) for call in _calls(groups)]
    count = sum(weight for _, weight in calls)
    if is_uniform([returned for returned, _ in calls]):
        return {name: [0.0] * len(of) for name, of in rollouts_of(groups)}
    mean = fsum(returned * weight for returned, weight in calls) / count
    squares = fsum((returned - mean) ** 2 * weight for returned, weight in calls)
    deviation = sqrt(squares / (count - 1))
    return {
        name: [(call.returned - mean) / deviation for call in of]
        for name, of in rollouts_of(groups)
    }


def rollouts_of(groups: Groups) -> Iterator[tuple[str, Sequence[Earned]]]:
    return chain.from_iterable(group.items() for group in groups.values())


def _calls(groups: Groups) -> list[Earned]:
    return [call for _, calls in rollouts_of(groups) for call in calls]


Aggregation = Literal["sum", "token_mean", "rollout_mean", "rollout_sum", "fixed"]


@dataclass(frozen=True)
class Advantage:
    """A row of the table.

    `in_groups`: the advantages of a group depend on no other group. `by_call`: each call gets its
    own advantage even if all share one reward. `by_token`: each sampled token gets its own
    advantage if every token has a penalty. `discounts`: the estimator reads the returns of calls,
    which a discount changes. `alone`: a rollout without others in its group has an advantage.
    """

    formula: str
    source: str
    estimate: AdvantageEstimator
    settings: Known = field(default_factory=dict[str, Number | Option])
    in_groups: bool = True
    by_call: bool = False
    by_token: bool = False
    discounts: bool = True
    alone: bool = False


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
    "none": Advantage(
        "r", "Williams, 1992", compare_calls(lambda returns, _: [*returns]), alone=True
    ),
    "zero": Advantage(
        "0",
        "arXiv:2306.13649",
        compare_calls(lambda returns, _: [0.0] * len(returns)),
        discounts=False,
        alone=True,
    ),
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
        "r - (mean + shift)", "arXiv:2506.20520", compare_calls(asymre), {"shift": Number(-0.1)}
    ),
    "maxrl": Advantage("(r - mean) / mean", "arXiv:2602.02710", compare_calls(maxrl)),
    "reinforce_plus_plus": Advantage(
        "(G - mean) / deviation, over the step's tokens",
        "arXiv:2501.03262",
        reinforce_plus_plus,
        in_groups=False,
        by_token=True,
        alone=True,
    ),
    "rebn": Advantage(
        "(G - mean) / deviation, over the step's calls",
        "arXiv:2510.01051",
        rebn,
        in_groups=False,
        by_call=True,
        alone=True,
    ),
    "step_grpo": Advantage(
        "(r - mean) / deviation of the rollouts, to each call whole or divided",
        "Trinity-RFT 0.6.0",
        step_grpo,
        {"spread": Option("copy", ("copy", "divide"))},
        by_call=True,
        discounts=False,
    ),
    "gigpo": Advantage(
        "A of the rollout + ω A of the call, among calls that observed the same",
        "arXiv:2505.10978",
        gigpo,
        {"omega": Number(1.0, 0), "deviation": Option("none", ("none", "group"))},
        by_call=True,
    ),
}


def find_advantage(name: str) -> Advantage:
    """Return the row of an advantage; ValueError if there is no such row."""
    return _own_advantage(name) if is_own(name) else find_row("advantage", name, ADVANTAGES)


def _own_advantage(name: str) -> Advantage:
    """Return a row of the user's project: one that is written there, or one of its function.

    Of a function nothing is known: it may compare what it likes.
    """

    def make(found: object) -> Advantage:
        if isinstance(found, Advantage):
            return found
        if not callable(found):
            raise OwnFunctionError(f"{name} is {found!r}, and no function; name one")
        formula = str(found.__doc__ or name).partition("\n")[0]
        estimate = cast("AdvantageEstimator", found)
        return Advantage(formula, name, estimate, ANY, in_groups=False, alone=True)

    return find_own(name, make)


def check_advantage(name: str, settings: Settings) -> None:
    """Refuse (ValueError) an unknown advantage, and a setting that it would ignore.

    A function of the user's project is tried: OwnFunctionError if it is no advantage.
    """
    row = find_advantage(name)
    complete_settings(f"the advantage {name}", settings, row.settings)
    if row.settings is ANY and is_as_bound(name):
        group = {f"rollout {place}": [Earned(place, place)] for place in (0.0, 1.0)}
        noted = NotedSettings(settings)
        estimate_advantages({"group": group}, name, noted)
        noted.refuse_ignored(f"the advantage {name}")


def _estimate_own(name: str, row: Advantage, groups: Groups, settings: Settings) -> Advantages:
    """Call a function of the project; OwnFunctionError unless each call gets a finite number."""
    with calling("advantage", name, "object of lists of numbers"):
        estimated = row.estimate(groups, settings)
        wanted = {rollout: len(calls) for rollout, calls in rollouts_of(groups)}
        found = {rollout: len(values) for rollout, values in estimated.items()}
        finite = all(map(isfinite, chain.from_iterable(estimated.values())))
    if found != wanted or not finite:
        raise OwnFunctionError(
            f"the advantage {name} does not return a finite number for each call of each rollout; "
            "return an object of lists, by the names of the rollouts"
        )
    return estimated


def estimate_advantages(groups: Groups, name: str, settings: Settings) -> Advantages:
    """Estimate the advantages of a step's calls; ValueError for a reward that is not finite."""
    for rollout, calls in rollouts_of(groups):
        for call in calls:
            if not isfinite(call.returned):
                raise ValueError(
                    f"rollout {rollout} has the reward {call.returned}: a reward must be a finite "
                    "number; let the agent raise instead, and the rollout counts as failed"
                )
    row = find_advantage(name)
    if not groups:
        return {}
    if row.settings is ANY:
        return _estimate_own(name, row, groups, settings)
    complete = complete_settings(f"the advantage {name}", settings, row.settings)
    return row.estimate(groups, complete)
