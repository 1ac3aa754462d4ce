"""Probes of single answers: seeds, scores of a prompt, clipped steps, several targets a place."""

from collections.abc import Callable
from functools import partial
from math import exp

import numpy as np
from tinker import TrainingClient

from ratchet.adapters.diagnosis.bench import (
    PROMPT,
    ROUGH,
    TARGETS,
    Bench,
    Finding,
    apart,
    datum,
    datum_of,
)

CHANCE = 0.01
"""Probability above which an answer tells nothing, since chance would have given it too."""
STILL = 0.05
"""Share of a whole step below which weights have not moved."""
SEEN = 0.02
"""Smallest move of a log-probability that is a step's and not a rounding's."""
NO_ROOM = {"clip_low_threshold": 1 - 1e-9, "clip_high_threshold": 1 + 1e-9}
"""Thresholds between which no ratio lies: such a loss has no gradient."""
CLIPPED_LOG_RATIOS = np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
"""Log-ratios that the defaults do not clip, and `NO_ROOM` does, with advantages of their signs."""


def probe_seeds(bench: Bench) -> list[Finding]:
    """Sample twice by one seed, and once by another."""
    sampler = bench.base_sampler()
    first, again, other = (
        bench.sample(sampler, seed=seed).sequences[0] for seed in (7, 7, 123_456_789)
    )
    expected = "the same tokens twice, then others"
    if first.tokens != again.tokens:
        return [Finding("seeds", "LIES", expected, "other tokens by the same seed")]
    if first.tokens != other.tokens:
        return [Finding("seeds", "offers", expected, expected)]
    by_chance = exp(sum(first.logprobs or [0.0]))
    verdict = "unknown" if by_chance > CHANCE else "LIES"
    return [Finding("seeds", verdict, expected, "the same tokens by every seed")]


def probe_prompts(bench: Bench) -> list[Finding]:
    """Have a prompt scored, by the sampler and by a trainer of the same weights."""
    asked = {"max_tokens": 1, "include_prompt_logprobs": True}
    answer = bench.sample(bench.base_sampler(), what="prompt log-probabilities", **asked)
    found = answer.prompt_logprobs_np
    name, expected = "prompt_logprobs", f"{len(PROMPT)} log-probabilities, those of a forward pass"
    if found is None or not len(found):
        return [Finding(name, "lacks", expected, "none")]
    if len(found) != len(PROMPT):
        return [Finding(name, "LIES", expected, f"{len(found)} log-probabilities")]
    (trained,) = bench.forward(bench.trainer(), [datum()])
    off = apart(found[1:].astype(np.float64), trained[: len(PROMPT) - 1])
    return [Finding.compared(name, expected, f"off by up to {off:.2g}", alike=off <= ROUGH)]


def probe_likeliest(bench: Bench) -> list[Finding]:
    """Ask for the two likeliest tokens of each place of a prompt, whose last is the likeliest."""
    sampler, k = bench.base_sampler(), 2
    asked = {"max_tokens": 1, "include_prompt_logprobs": True, "topk_prompt_logprobs": k}
    greedy = bench.sample(sampler, temperature=0.0, max_tokens=1).sequences[0]
    prompt = [*PROMPT, greedy.tokens[0]]
    answer = bench.sample(sampler, prompt=prompt, what="the likeliest tokens", **asked)
    expected = f"{k} tokens a place, the likeliest first"
    found = answer.topk_prompt_logprobs_np
    if found is None:
        return [Finding("likeliest", "lacks", expected, "none")]
    ids, logprobs = found.token_ids, found.logprobs
    if ids.shape != (len(prompt), k):
        said = f"a table of {' by '.join(map(str, ids.shape))} for {len(prompt)} places"
        return [Finding("likeliest", "LIES", expected, said)]
    ordered = bool((np.diff(logprobs[1:], axis=1) <= 0).all())
    own = float(answer.prompt_logprobs_np[-1]) if answer.prompt_logprobs_np is not None else None
    first = int(ids[-1, 0]) == greedy.tokens[0]
    first &= own is None or abs(float(logprobs[-1, 0]) - own) <= ROUGH
    if not (ordered and first):
        return [Finding("likeliest", "LIES", expected, "other tokens, or another order")]
    return [Finding("likeliest", "offers", expected, expected)]


def probe_clip(bench: Bench) -> list[Finding]:
    """Take a step of ppo between whose thresholds no ratio lies, then one of cross-entropy."""
    client = bench.trainer()
    (before,) = bench.forward(client, [datum()])
    signs = np.sign(CLIPPED_LOG_RATIOS)
    given = datum(logprobs=[*(before - CLIPPED_LOG_RATIOS)], advantages=[*signs])

    def clip() -> None:
        bench.wait(bench.submit(client, [given], "ppo", NO_ROOM), "forward_backward with ppo")
        bench.step(client)

    return [_stands_still(bench, client, "clip", clip)]


def probe_grad_clip(bench: Bench) -> list[Finding]:
    """Take a step whose gradient is clipped to nothing, then one that is not clipped."""
    client = bench.trainer()
    clip = partial(bench.learn, client, datum(), grad_clip_norm=1e-14)
    return [_stands_still(bench, client, "grad_clip", clip)]


def _stands_still(
    bench: Bench, client: TrainingClient, name: str, act: Callable[[], None]
) -> Finding:
    """Tell whether an act leaves the weights as they are, which a plain step afterwards moves."""
    (before,) = bench.forward(client, [datum()])
    act()
    (after,) = bench.forward(client, [datum()])
    bench.learn(client, datum())
    (moved,) = bench.forward(client, [datum()])
    still, whole = apart(after, before), apart(moved, after)
    expected = "log-probabilities that stay"
    said = f"moved by {still:.2g}; a plain step by {whole:.2g}"
    if still > max(STILL * whole, 1e-6):
        return Finding(name, "LIES", expected, said)
    return Finding(name, "offers" if whole > SEEN else "unknown", expected, said)


def probe_targets(bench: Bench) -> list[Finding]:
    """Have two targets a place scored in one datum, and each alone in a datum of its own."""
    client = bench.trainer()
    others = [*reversed(TARGETS)]
    pairs = [[*pair] for pair in zip(TARGETS, others, strict=True)]
    ones = [1.0] * len(TARGETS)
    alone = [datum(ones), datum_of(PROMPT, others, {"weights": ones})]
    scored = np.stack(bench.forward(client, alone), axis=1)
    both = datum_of(PROMPT, pairs, {"weights": [[1.0, 1.0]] * len(TARGETS)})
    (found,) = bench.forward(client, [both])
    expected = f"log-probabilities of the shape {scored.shape}, each as alone"
    if found.shape != scored.shape:
        said = f"log-probabilities of the shape {found.shape}"
        return [Finding("targets", "LIES", expected, said)]
    off = apart(found, scored)
    return [Finding.compared("targets", expected, f"off by up to {off:.2g}", alike=off <= SEEN)]
