"""Every row of the tables against its definition, written out by token, call and group."""

from collections.abc import Callable, Sequence
from math import exp

import numpy as np
import pytest

from benchmarks.peers.inputs import DISCOUNT, Call, Tokens, draw_steps, draw_trajectories
from benchmarks.peers.ours import compute_advantages, compute_losses
from ratchet.tasks.algorithm.advantages import ADVANTAGES
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
from ratchet.tasks.algorithm.settings import Settings

TRAJECTORIES = draw_trajectories(100, seed=1)
STEPS = draw_steps(seed=1)

Rule = Callable[[float, float, float, float], tuple[float, float]]
"""log p, log q, A and the trajectory's mean of log p - log q → loss and derivative of a token."""


def clipped(ratio: float, a: float, low: float, high: float) -> tuple[float, float]:
    """PPO's loss: constant where the ratio has gone further than its clip in A's direction."""
    if a > 0 and ratio > high:
        return -high * a, 0.0
    if a < 0 and ratio < low:
        return -low * a, 0.0
    return -ratio * a, -ratio * a


def truncated(ratio: float, log_p: float, a: float) -> tuple[float, float]:
    weight = min(ratio, 4.0)
    return -weight * a * log_p, -weight * a


RULES: dict[str, Rule] = {
    "importance_sampling": lambda p, q, a, _: (-exp(p - q) * a, -exp(p - q) * a),
    "ppo": lambda p, q, a, _: clipped(exp(p - q), a, 0.8, 1.2),
    "cispo": lambda p, q, a, _: truncated(exp(p - q), p, a),
    "gspo": lambda _p, _q, a, mean: clipped(exp(mean), a, 0.9997, 1.0004),
    "cross_entropy": lambda p, _q, a, _: (-a * p, -a),
    "opmd": lambda p, _q, a, _: (-a * p / 2, -a / 2),
}


def test_every_loss_of_one_pass_has_its_rule_here() -> None:
    assert RULES.keys() == {name for name, row in TOKEN_LOSSES.items() if row.weighted is None}


@pytest.mark.parametrize("name", RULES)
def test_a_loss_and_its_gradient_are_those_of_its_rule(name: str) -> None:
    computed = compute_losses(name, {}, TRAJECTORIES)
    for tokens, loss, gradient in zip(
        TRAJECTORIES, computed.losses, computed.gradients, strict=True
    ):
        by_token = [RULES[name](*of) for of in tokens_of(tokens)]
        assert loss == pytest.approx(sum(value for value, _ in by_token), abs=1e-6)
        assert gradient == pytest.approx([slope for _, slope in by_token], abs=1e-6)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_no_loss_moves_a_token_that_was_not_sampled(name: str) -> None:
    """A datum has 0 as the sampling log-probability of such a token, and its ratio is not 1."""
    choices: Settings = {"regularizer": "k2"} if name == "rec" else {}
    computed = compute_losses(name, choices, TRAJECTORIES)
    for tokens, gradient in zip(TRAJECTORIES, computed.gradients, strict=True):
        moved = [value for value, mask in zip(gradient, tokens["mask"], strict=True) if not mask]
        assert moved == [0.0] * len(moved)


def tokens_of(tokens: Tokens) -> list[tuple[float, float, float, float]]:
    """Return log p, log q and A of each token, and the mean log ratio of the sampled ones."""
    p, q, mask = (np.array(tokens[name]) for name in ("logprobs", "sampling_logprobs", "mask"))
    mean = float(((p - q) * mask).sum() / mask.sum())
    return [(*of, mean) for of in zip(p, q, tokens["advantages"], strict=True)]


Rollout = list[tuple[float, float, int, str]]
"""Return, the rollout's reward, tokens and state of each call."""

Definition = Callable[[list[list[Rollout]]], list[list[list[float]]]]
"""Groups of rollouts of calls → their advantages."""


def by_place(compare: Callable[[np.ndarray], np.ndarray]) -> Definition:
    """Compare the return of each call with those of the group at its place."""

    def define(groups: list[list[Rollout]]) -> list[list[list[float]]]:
        made = []
        for group in groups:
            rows = [[0.0] * len(rollout) for rollout in group]
            for place in range(max(map(len, group))):
                those = [index for index, rollout in enumerate(group) if place < len(rollout)]
                values = compare(np.array([group[index][place][0] for index in those]))
                for index, value in zip(those, values, strict=True):
                    rows[index][place] = float(value)
            made.append(rows)
        return made

    return define


def deviation(values: np.ndarray) -> float:
    """Return the square root of Σ (x - mean)² / (n - 1), or 1 for a single value."""
    apart = values - values.sum() / len(values)
    return float(np.sqrt((apart**2).sum() / (len(values) - 1))) if len(values) > 1 else 1.0


def without_own(values: np.ndarray) -> np.ndarray:
    others = [np.delete(values, index) for index in range(len(values))]
    pairs = zip(values, others, strict=True)
    return np.array([value - rest.mean() if len(rest) else 0.0 for value, rest in pairs])


def over_step(weigh: Callable[[int], int], *, center: bool) -> Definition:
    """Divide by the deviation of the step's returns; subtract their mean, or that of the place."""

    def define(groups: list[list[Rollout]]) -> list[list[list[float]]]:
        calls = [call for group in groups for rollout in group for call in rollout]
        all_of_them = np.concatenate([[returned] * weigh(n) for returned, _, n, _ in calls])
        if not center:
            apart = by_place(lambda values: values - values.mean())(groups)
        else:
            apart = [[[g - all_of_them.mean() for g, *_ in of] for of in group] for group in groups]
        spread = deviation(all_of_them)
        return [[[value / spread for value in of] for of in group] for group in apart]

    return define


def of_rollouts(groups: list[list[Rollout]]) -> list[list[list[float]]]:
    made = []
    for group in groups:
        rewards = np.array([rollout[0][1] for rollout in group])
        values = (rewards - rewards.mean()) / deviation(rewards)
        made.append([[float(v)] * len(of) for v, of in zip(values, group, strict=True)])
    return made


def of_rollouts_and_states(groups: list[list[Rollout]]) -> list[list[list[float]]]:
    made = []
    for group in groups:
        rewards = np.array([rollout[0][1] for rollout in group])
        calls = [call for rollout in group for call in rollout]

        def mean_at(state: str, calls: Rollout = calls) -> float:
            return float(np.mean([returned for returned, *_, other in calls if other == state]))

        made.append(
            [
                [
                    of[0][1] - rewards.mean() + returned - mean_at(state)
                    for returned, *_, state in of
                ]
                for of in group
            ]
        )
    return made


DEFINITIONS: dict[str, Definition] = {
    "centred": by_place(lambda r: r - r.mean()),
    "standardized": by_place(lambda r: (r - r.mean()) / deviation(r)),
    "standardized_over_step": over_step(lambda _: 1, center=False),
    "leave_one_out": by_place(without_own),
    "none": by_place(lambda r: r),
    "zero": by_place(lambda r: 0 * r),
    "opmd": by_place(lambda r: r - r.mean()),
    "asymre": by_place(lambda r: r - (r.mean() - 0.1)),
    "maxrl": by_place(lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r),
    "reinforce_plus_plus": over_step(lambda tokens: tokens, center=True),
    "rebn": over_step(lambda _: 1, center=True),
    "step_grpo": of_rollouts,
    "gigpo": of_rollouts_and_states,
}


def test_every_advantage_has_its_definition_here() -> None:
    assert DEFINITIONS.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("step", ["groups", "turns", "shared"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_is_that_of_its_definition(name: str, step: str) -> None:
    calls = STEPS[step]
    expected = DEFINITIONS[name](groups_of(calls))
    flat = [value for group in expected for rollout in group for value in rollout]
    assert compute_advantages(name, {}, calls) == pytest.approx(flat, abs=1e-6)


def groups_of(calls: Sequence[Call]) -> list[list[Rollout]]:
    """Return groups of rollouts, in order, each call with its discounted return."""
    groups: list[list[Rollout]] = []
    for task in sorted({call["task"] for call in calls}):
        runs = sorted({call["run"] for call in calls if call["task"] == task})
        groups.append([])
        for run in runs:
            those = [call for call in calls if (call["task"], call["run"]) == (task, run)]
            rewards = [call["call_reward"] for call in those]
            rollout = []
            for place, call in enumerate(those):
                later = enumerate(rewards[place:])
                returned = sum(DISCOUNT**steps * reward for steps, reward in later)
                rollout.append((returned, sum(rewards), len(call["logprobs"]), call["state"]))
            groups[-1].append(rollout)
    return groups
