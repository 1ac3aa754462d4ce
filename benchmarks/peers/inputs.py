"""Random inputs that our formulas and the peers' get: the same for every run of the comparison."""

from typing import TypedDict

import numpy as np

from ratchet.tasks.algorithm.preferences import SIDES

DRIFTS = (0.0, 3e-4, 0.05, 0.8)
"""Deviations of log p - log q by token: on policy, about the clip of GSPO, and beyond all clips."""

REFERENCE_DRIFTS = (0.5, 3.0)
"""Deviations of log ref - log q by token: within the bounds of low_var_kl, and beyond."""

DISCOUNT = 0.9
RANK_PENALTY = 0.25


Sums = dict[str, dict[str, list[float]]]
"""Side → log p, log ref and number of its trained tokens, of each pair."""


class Tokens(TypedDict):
    """Tokens of one trajectory.

    Where one is not sampled, its mask, advantage and sampling log-probability are 0, as in datums.
    """

    logprobs: list[float]
    sampling_logprobs: list[float]
    reference_logprobs: list[float]
    advantages: list[float]
    mask: list[float]


class Call(TypedDict):
    """A call of a rollout, which is run `run` of the task `task`.

    `reward` is the rollout's, and `call_reward` the call's share of it.
    """

    task: int
    run: int
    call: int
    reward: float
    call_reward: float
    logprobs: list[float]
    state: str


def draw_trajectories(count: int, seed: int) -> list[Tokens]:
    """Draw trajectories of 2 to 12 tokens, each with one advantage."""
    random = np.random.default_rng(seed)
    drawn: list[Tokens] = []
    for place in range(count):
        size = int(random.integers(2, 13))
        sampling = _single_precision(-random.exponential(1.0, size) - 0.01)
        mask = (random.random(size) < 0.8).astype(float)
        mask[-1] = 1.0
        drift, apart = DRIFTS[place % len(DRIFTS)], REFERENCE_DRIFTS[place % 2]
        drawn.append(
            {
                "logprobs": (sampling + drift * random.standard_normal(size)).tolist(),
                "sampling_logprobs": (mask * sampling).tolist(),
                "reference_logprobs": _single_precision(
                    sampling + apart * random.standard_normal(size)
                ).tolist(),
                "advantages": _single_precision(mask * random.standard_normal()).tolist(),
                "mask": mask.tolist(),
            }
        )
    return drawn


def draw_pairs(count: int, seed: int) -> Sums:
    """Draw the sums over the trained tokens of each side of pairs, of 1 to 12 tokens.

    Mismatched answers are likelier than by the reference, so that the z of `kto` is above 0.
    """
    random = np.random.default_rng(seed)
    drawn = {}
    for side in SIDES:
        tokens = random.integers(1, 13, count).astype(float)
        log_ref = -random.exponential(1.0, count) * tokens - 0.01
        apart = random.standard_normal(count) + (side == "mismatched")
        log_p = np.minimum(log_ref + apart * tokens / 2, -0.01)
        columns = {"log_p": log_p, "log_ref": log_ref, "tokens": tokens}
        drawn[side] = {name: values.tolist() for name, values in columns.items()}
    return drawn


def label_answers(pairs: Sums) -> Sums:
    """Leave one side of each pair, the chosen one of every third; the other one has no tokens."""
    left = {"chosen": (1, 0, 0), "rejected": (0, 1, 1), "mismatched": (1, 1, 1)}
    return {
        side: {
            name: [value * left[side][at % 3] for at, value in enumerate(values)]
            for name, values in of.items()
        }
        for side, of in pairs.items()
    }


def draw_steps(seed: int) -> dict[str, list[Call]]:
    """Draw the rollouts of steps: of one call or of several, and those that are easily missed.

    `ranked` has the raw reward in `reward`, and in `call_reward` the one with the rank penalty of
    arXiv:2506.02355: the more probable an answer in its group, the more its reward shrinks.
    """
    random = np.random.default_rng(seed)
    groups = [random.normal(0.5, 1.0, size).tolist() for size in (2, 3, 4, 6, 8)]
    ranked = _single_calls(random, [[1.0, 1.0, 0.0, 0.5], [0.2, 0.9, 1.0, 0.9, 0.4]])
    for task in {call["task"] for call in ranked}:
        group = [call for call in ranked if call["task"] == task]
        group.sort(key=lambda call: float(np.mean(call["logprobs"])))
        for rank, call in enumerate(group):
            call["call_reward"] = call["reward"] * (1 - RANK_PENALTY * rank / len(group))
    return {
        "groups": _single_calls(random, groups),
        "uniform": _single_calls(random, [[0.1] * 8, [0.7] * 8]),
        "alone": _single_calls(random, [[0.7]]),
        "ranked": ranked,
        "turns": _several_calls(random, shared=False),
        "shared": _several_calls(random, shared=True),
    }


def _single_calls(random: np.random.Generator, groups: list[list[float]]) -> list[Call]:
    return [
        {
            "task": task,
            "run": run,
            "call": 0,
            "reward": reward,
            "call_reward": reward,
            "logprobs": _draw_logprobs(random),
            "state": str(task),
        }
        for task, rewards in enumerate(groups)
        for run, reward in enumerate(rewards)
    ]


def _several_calls(random: np.random.Generator, *, shared: bool) -> list[Call]:
    """Draw rollouts of 1 to 4 calls; tasks have states in common if these are `shared`."""
    calls: list[Call] = []
    for task in range(3):
        for run in range(4):
            rewards = random.normal(0.5, 1.0, int(random.integers(1, 5))).tolist()
            for number, reward in enumerate(rewards):
                state = f"s{random.integers(3)}"
                calls.append(
                    {
                        "task": task,
                        "run": run,
                        "call": number,
                        "reward": sum(rewards),
                        "call_reward": reward,
                        "logprobs": _draw_logprobs(random),
                        "state": state if shared else f"{task} {state}",
                    }
                )
    return calls


def _draw_logprobs(random: np.random.Generator) -> list[float]:
    return (-random.exponential(1.0, int(random.integers(1, 9)))).tolist()


def _single_precision(values: np.ndarray) -> np.ndarray:
    """Round to what a datum holds, so that no difference comes of the rounding."""
    return values.astype(np.float32).astype(np.float64)
