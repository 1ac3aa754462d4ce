"""Probes of training: each loss by its number, and what a step does to the weights.

An untrained LoRA changes nothing, and the first step of Adam moves each of its weights by the
learning rate, whatever the gradient's size; so what a step should move is known without the model.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from tinker import Datum, TrainingClient
from tinker.types import LossFnType

from adapters.diagnosis.bench import (
    PROMPT,
    STEP,
    TARGETS,
    Bench,
    Finding,
    Verdict,
    apart,
    datum,
    datum_of,
    logprobs_of,
)

RELATIVE_ERROR = 0.02
"""Relative error of a number that was computed in another precision."""
STILL = 0.05
"""Share of a whole step below which weights have not moved."""
SEEN = 0.02
"""Smallest move of a log-probability that is a step's and not a rounding's."""
LOG_RATIOS = np.array([0.4, -0.4, 0.05, -0.05, 0.4, 0.4])
ADVANTAGES = np.array([1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
LOW, HIGH = 0.9, 1.1
CLIPS_OF_PROBE = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
NO_ROOM = {"clip_low_threshold": 1 - 1e-9, "clip_high_threshold": 1 + 1e-9}
"""Thresholds between which no ratio lies: such a loss has no gradient."""
CLIPPED_LOG_RATIOS = np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
"""Log-ratios that the defaults do not clip, and `NO_ROOM` does, with advantages of their signs."""
FIRST_STEP = 3e-4
"""Learning rate of a first step whose effect is in proportion to its size."""
PLAIN_EPSILON = 10.0
"""An epsilon beside which a gradient is small: the step is then in proportion to the gradient."""
PLAIN_STEPS = 1e-3, 3e-3, 0.01, 0.03, 0.1
"""Learning rates of such a step: a service that divides a gradient by its tokens needs larger ones.
"""
RANKS = 4, 16
ALPHA = 32
"""Tinker's α, which a recipe's learning rate counts on."""
LEAST = 1e-9
LEAST_TOLD = 0.3
"""Least loss that a step takes away which tells something, also of bfloat16 log-probabilities."""

LossOf = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Log-probabilities and log-ratios → each token's loss, and its derivative."""


def _cross_entropy(logprobs: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return -ADVANTAGES * logprobs, -ADVANTAGES


def _importance(_: np.ndarray, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    loss = -np.exp(log_ratios) * ADVANTAGES
    return loss, loss


def _clipped(_: np.ndarray, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ratio = np.exp(log_ratios)
    free, bound = ratio * ADVANTAGES, np.clip(ratio, LOW, HIGH) * ADVANTAGES
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0.0)


def _of_sequence(logprobs: np.ndarray, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _clipped(logprobs, np.full(len(log_ratios), log_ratios.mean()))


def _cispo(logprobs: np.ndarray, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weight = np.clip(np.exp(log_ratios), LOW, HIGH) * ADVANTAGES
    return -weight * logprobs, -weight


LOSSES: Mapping[LossFnType, LossOf] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance,
    "ppo": _clipped,
    "cispo": _cispo,
    "gspo": _of_sequence,
}
CLIPPING = ("ppo", "cispo", "gspo")


def probe_loss(name: LossFnType, bench: Bench) -> list[Finding]:
    """Compare a loss with its formula, and see whether a step lessens it."""
    client = bench.trainer()
    (before,) = bench.forward(client, [datum()])
    config = CLIPS_OF_PROBE if name in CLIPPING else None
    given = _inputs(name, before - LOG_RATIOS)
    asked = bench.submit(client, [given], name, config)
    output = bench.wait(asked, f"forward_backward with {name}")
    (logprobs,) = logprobs_of(output)
    losses, slopes = LOSSES[name](
        logprobs.astype(np.float64), logprobs.astype(np.float64) - (before - LOG_RATIOS)
    )
    expected, found = float(losses.sum()), output.metrics.get("loss:sum")
    clips = f" with {CLIPS_OF_PROBE}" if config else ""
    request = f"forward_backward of {name}{clips}, log-ratios {[*LOG_RATIOS]}"
    row = f"loss {name}"
    if found is None:
        said = f"no loss:sum, but {', '.join(output.metrics) or 'nothing'}"
        return [Finding(row, "LIES", request, f"loss:sum {expected:.4f}", said)]
    told = f"loss:sum {expected:.4f}, lessened by a step"
    if abs(found - expected) > RELATIVE_ERROR * max(1.0, abs(expected)):
        return [Finding(row, "LIES", request, told, f"loss:sum {found:.4f}", found)]
    bench.step(client, learning_rate=STEP / 10)
    (after,) = bench.forward(client, [datum()])
    gained = float(slopes @ (after.astype(np.float64) - before))
    said = f"loss:sum {found:.4f}, {'lessened' if gained < 0 else 'not lessened'} by a step"
    return [Finding(row, "offers" if gained < 0 else "LIES", request, told, said, found)]


def _inputs(name: LossFnType, sampled: np.ndarray) -> Datum:
    if name == "cross_entropy":
        return datum([*ADVANTAGES])
    more = {"sequence_ratio_mask": [1.0] * len(TARGETS)} if name == "gspo" else {}
    return datum(logprobs=[*sampled], advantages=[*ADVANTAGES], **more)


def probe_clip(bench: Bench) -> list[Finding]:
    """Take a step of ppo between whose thresholds no ratio lies, then one of cross-entropy."""
    client = bench.trainer()
    (before,) = bench.forward(client, [datum()])
    signs = np.sign(CLIPPED_LOG_RATIOS)
    given = datum(logprobs=[*(before - CLIPPED_LOG_RATIOS)], advantages=[*signs])

    def clip() -> None:
        bench.wait(bench.submit(client, [given], "ppo", NO_ROOM), "forward_backward with ppo")
        bench.step(client)

    request = "a step of ppo with clip thresholds 1 - 1e-9 and 1 + 1e-9, all ratios beyond them"
    return [_stands_still(bench, client, "clip", request, clip)]


def probe_grad_clip(bench: Bench) -> list[Finding]:
    """Take a step whose gradient is clipped to nothing, then one that is not clipped."""
    client = bench.trainer()

    def clipped() -> None:
        bench.wait(bench.submit(client, [datum()]), "forward_backward")
        bench.step(client, grad_clip_norm=1e-14)

    request = f"optim_step with grad_clip_norm 1e-14, eps 1e-8, learning rate {STEP:g}"
    return [_stands_still(bench, client, "grad_clip", request, clipped)]


def _stands_still(
    bench: Bench, client: TrainingClient, name: str, request: str, act: Callable[[], None]
) -> Finding:
    """Tell whether an act leaves the weights as they are, which a plain step afterwards moves."""
    (before,) = bench.forward(client, [datum()])
    act()
    (after,) = bench.forward(client, [datum()])
    bench.wait(bench.submit(client, [datum()]), "forward_backward")
    bench.step(client)
    (moved,) = bench.forward(client, [datum()])
    still, whole = apart(after, before), apart(moved, after)
    expected = "log-probabilities that stay"
    said = f"moved by {still:.2g}; a plain step by {whole:.2g}"
    if still <= max(STILL * whole, 1e-6):
        verdict = "offers" if whole > SEEN else "unknown"
        return Finding(name, verdict, request, expected, said, still)
    return Finding(name, "LIES", request, expected, said, still)


def probe_targets(bench: Bench) -> list[Finding]:
    """Have two targets a place scored in one datum, and each alone in a datum of its own."""
    client = bench.trainer()
    others = [*reversed(TARGETS)]
    pairs = [[*pair] for pair in zip(TARGETS, others, strict=True)]
    ones = [1.0] * len(TARGETS)
    alone = [datum(ones), datum_of(PROMPT, others, {"weights": ones})]
    expected = np.stack(bench.forward(client, alone), axis=1)
    both = datum_of(PROMPT, pairs, {"weights": [[1.0, 1.0]] * len(TARGETS)})
    (found,) = bench.forward(client, [both])
    request = f"forward of target_tokens of the shape {expected.shape}"
    told = "log-probabilities of that shape, each as alone"
    if found.shape != expected.shape:
        said = f"log-probabilities of the shape {found.shape}"
        return [Finding("targets", "LIES", request, told, said)]
    off = apart(found, expected)
    verdict = "offers" if off <= SEEN else "LIES"
    return [Finding("targets", verdict, request, told, f"off by up to {off:.2g}", off)]


def probe_alpha(bench: Bench) -> list[Finding]:
    """Take the first step of two LoRAs of different ranks, and compare what it moves.

    A step of Adam moves a LoRA of rank r by α whatever r is, where its scale is α / r. A step in
    proportion to the gradient moves it by α² / r. So the first tells whether α depends on the rank,
    and both together whether the rank is what was asked. The size of α itself is not known, since a
    service draws the first weights as it likes.
    """
    low, high = RANKS
    signs = [_first_step(bench, rank, learning_rate=FIRST_STEP) for rank in RANKS]
    step, plain = _plain_steps(bench)
    ratio, wider = signs[1] / max(signs[0], LEAST), high / low
    ranks = ratio**2 * plain[0] / max(plain[1], LEAST)
    first = f"the first step of LoRAs of rank {low} and {high} at learning rate {FIRST_STEP:g}"
    alpha = Finding(
        "alpha",
        _judge(1 / 2 < ratio < 2, *signs),
        first,
        f"steps that do not depend on the rank, as by α {ALPHA}",
        f"{ratio:.2g} times the step by {wider:g} times the rank",
        ratio,
    )
    rank = Finding(
        "rank",
        _judge(wider / 2 < ranks < wider * 2, *signs, *plain),
        f"{first}, and at {step:g} with eps {PLAIN_EPSILON:g}",
        f"{wider:g} times the rank",
        f"{ranks:.2g} times the rank",
        ranks,
    )
    return [alpha, rank]


def _judge(as_expected: bool, *steps: float) -> Verdict:
    """Tell what steps show, if all of them are large enough to show anything."""
    if min(steps) < LEAST_TOLD:
        return "unknown"
    return "offers" if as_expected else "LIES"


def _plain_steps(bench: Bench) -> tuple[float, tuple[float, float]]:
    """Take steps in proportion to the gradient, of the first learning rate that tells something.

    Returns it, and the loss that a step of each rank takes away; the higher rank takes less.
    """
    step, high = PLAIN_STEPS[0], 0.0
    for step in PLAIN_STEPS:
        high = _first_step(bench, RANKS[-1], learning_rate=step, eps=PLAIN_EPSILON)
        if high >= LEAST_TOLD:
            break
    return step, (_first_step(bench, RANKS[0], learning_rate=step, eps=PLAIN_EPSILON), high)


def _first_step(bench: Bench, rank: int, **params: float) -> float:
    """Return the loss that the first step of a LoRA takes away."""
    with bench.beside() as own:
        client = own.trainer(rank)
        (before,) = own.forward(client, [datum()])
        own.wait(own.submit(client, [datum()]), "forward_backward")
        own.step(client, **params)
        (after,) = own.forward(client, [datum()])
    return float((after.astype(np.float64) - before).sum())


def loss_probes() -> Mapping[str, Callable[[Bench], list[Finding]]]:
    """Map the row of each loss to its probe."""
    return {f"loss {name}": partial(probe_loss, name) for name in LOSSES}
