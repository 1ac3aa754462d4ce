"""The table of advantages: what the returns of a step's calls become, and the credit of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from tasks.algorithm import comparisons
from tasks.algorithm.comparisons import (
    AdvantageEstimator,
    Advantages,
    Baselines,
    Groups,
    compare_calls,
    rollouts_of,
)
from tasks.algorithm.divergences import Penalty
from tasks.algorithm.settings import Known, Number, Option, Settings, complete_settings, find_row

Aggregation = Literal["sum", "token_mean", "rollout_mean", "rollout_sum", "fixed"]


@dataclass(frozen=True)
class Advantage:
    """A row of the table.

    `in_groups`: the advantages of a group depend on no other group. `by_call`: each call gets its
    own advantage even if all share one reward. `by_token`: so does each sampled token, if rewards
    have a penalty for each. `discounts`: the estimator reads the returns of calls, which a discount
    changes. `by_history`: it reads the role's mean rewards in earlier steps. `by_greedy`: each
    example is played greedily as well. `alone`: a rollout without others in its group has an
    advantage.
    """

    formula: str
    source: str
    estimate: AdvantageEstimator
    settings: Known = field(default_factory=dict[str, Number | Option])
    in_groups: bool = True
    by_call: bool = False
    by_token: bool = False
    discounts: bool = True
    by_history: bool = False
    by_greedy: bool = False
    alone: bool = False


@dataclass(frozen=True)
class CreditAssignment:
    """Method by which rewards become the advantages of sampled tokens.

    `discount` is γ of the returns of calls, `advantage` a name of ADVANTAGES, and `aggregation`
    the factor of each datum's loss (`tasks.datums.build`), with its `divisor` if it is `fixed`. A
    group with fewer than `min_group_size` rollouts to train on is left out, and so is a trajectory
    of zero advantage, unless the loss is `regularized`, as it is with a penalty. `penalties` are
    for divergence from a reference or from teachers, and `entropy_coefficient` times -log q, which
    estimates the entropy, is added to the advantage of each sampled token: in expectation this is
    the entropy's gradient
    (Williams and Peng, 1991). `rewards_query` shapes and filters the rewards first
    (`tasks.algorithm.shaping`); they are a judge's if the step is `judged`. After the comparison,
    at most `trained_calls` of a step's calls are drawn, by the `seed`, to be trained.
    """

    advantage: str
    aggregation: Aggregation = "sum"
    min_group_size: int = 1
    discount: float = 1.0
    advantage_settings: Settings = field(default_factory=dict[str, float | str])
    divisor: float | None = None
    regularized: bool = False
    penalties: tuple[Penalty, ...] = ()
    entropy_coefficient: float = 0.0
    rewards_query: str | None = None
    judged: bool = False
    trained_calls: int | None = None
    seed: int = 0


ADVANTAGES: Mapping[str, Advantage] = {
    "centred": Advantage("r - mean", "arXiv:2503.20783", compare_calls(comparisons.centred)),
    "standardized": Advantage(
        "(r - mean) / deviation",
        "arXiv:2402.03300",
        compare_calls(comparisons.standardized),
        {"threshold": Number(0.0, 0)},
    ),
    "standardized_over_step": Advantage(
        "(r - mean) / deviation of the step's rewards",
        "arXiv:2508.08221",
        comparisons.standardize_over_step,
        in_groups=False,
    ),
    "leave_one_out": Advantage(
        "r - mean of the others", "arXiv:2402.14740", compare_calls(comparisons.leave_one_out)
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
        compare_calls(comparisons.opmd),
        {
            "baseline": Option("mean", ("mean", "log_mean_exp")),
            "tau": Number(1.0, 1e-3, used_by=("baseline", ("log_mean_exp",))),
        },
    ),
    "remax": Advantage(
        "r - reward of the example's greedy rollout",
        "arXiv:2310.10505",
        comparisons.remax,
        discounts=False,
        by_greedy=True,
        alone=True,
    ),
    "asymre": Advantage(
        "r - (mean + shift)",
        "arXiv:2506.20520",
        compare_calls(comparisons.asymre),
        {"shift": Number(-0.1)},
    ),
    "maxrl": Advantage("(r - mean) / mean", "arXiv:2602.02710", compare_calls(comparisons.maxrl)),
    "reinforce_plus_plus": Advantage(
        "(G - mean) / deviation, over the step's tokens",
        "arXiv:2501.03262",
        comparisons.reinforce_plus_plus,
        in_groups=False,
        by_token=True,
        alone=True,
    ),
    "rebn": Advantage(
        "(G - mean) / deviation, over the step's calls",
        "arXiv:2510.01051",
        comparisons.rebn,
        in_groups=False,
        by_call=True,
        alone=True,
    ),
    "step_grpo": Advantage(
        "(r - mean) / deviation of the rollouts, to each call whole or divided",
        "Trinity-RFT 0.6.0",
        comparisons.step_grpo,
        {"spread": Option("copy", ("copy", "divide"))},
        by_call=True,
        discounts=False,
    ),
    "gigpo": Advantage(
        "A of the rollout + ω A of the call, among calls that observed the same",
        "arXiv:2505.10978",
        comparisons.gigpo,
        {"omega": Number(1.0, 0), "deviation": Option("none", ("none", "group"))},
        by_call=True,
    ),
    "running_mean": Advantage(
        "r - moving average of the role's mean rewards in earlier steps",
        "arXiv:2506.24119",
        comparisons.running_mean,
        {"decay": Number(0.95, 0, 1)},
        in_groups=False,
        discounts=False,
        by_history=True,
        alone=True,
    ),
}


def find_advantage(name: str) -> Advantage:
    """Return the row of an advantage; ValueError if there is none."""
    return find_row("advantage", name, ADVANTAGES)


def check_advantage(name: str, settings: Settings) -> None:
    """Refuse (ValueError) an unknown advantage, and a setting that it would ignore."""
    complete_settings(f"the advantage {name}", settings, find_advantage(name).settings)


def estimate_advantages(
    groups: Groups, name: str, settings: Settings, baselines: Baselines | None = None
) -> Advantages:
    """Estimate the advantages of a step's calls; ValueError for a reward that is not finite."""
    for rollout, calls in rollouts_of(groups):
        for call in calls:
            if not isfinite(call.returned):
                raise ValueError(
                    f"rollout {rollout} has the reward {call.returned}: a reward must be a finite "
                    "number; let the agent raise instead, and the rollout counts as failed"
                )
    row = find_advantage(name)
    complete = complete_settings(f"the advantage {name}", settings, row.settings)
    return row.estimate(groups, complete, baselines or Baselines()) if groups else {}
