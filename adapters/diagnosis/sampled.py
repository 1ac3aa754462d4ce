"""Probes of sampling: seeds, temperature, top-k, top-p, log-probabilities of prompts, speed."""

import time
from math import exp
from typing import Any

import numpy as np

from adapters.diagnosis.bench import PROMPT, ROUGH, Bench, Finding, apart, continued, datum
from adapters.tinker.service import PatientSampler

CHANCE = 0.01
"""Probability above which an answer tells nothing, since chance would have given it too."""
CROWDS = (1, 4, 16, 48)
SLOWER = 3.0
"""A crowd slows a service if its calls take so many times as long as one call alone."""
SHORT = PROMPT[:2]


def probe_seeds(bench: Bench) -> list[Finding]:
    """Sample twice by one seed, and once by another."""
    sampler = bench.base_sampler()
    first, again, other = (
        bench.sample(sampler, seed=seed).sequences[0] for seed in (7, 7, 123_456_789)
    )
    request = "asample with seed 7 twice, and with seed 123456789 once"
    expected = "the same tokens twice, then others"
    if first.tokens != again.tokens:
        return [Finding("seeds", "LIES", request, expected, "other tokens by the same seed")]
    if first.tokens != other.tokens:
        return [Finding("seeds", "offers", request, expected, expected)]
    by_chance = exp(sum(first.logprobs or [0.0]))
    verdict = "unknown" if by_chance > CHANCE else "LIES"
    return [Finding("seeds", verdict, request, expected, "the same tokens by every seed")]


def probe_greedy(bench: Bench) -> list[Finding]:
    """Sample at temperature 0 twice, by different seeds."""
    sampler = bench.base_sampler()
    first, again = (
        bench.sample(sampler, temperature=0.0, seed=seed).sequences[0] for seed in (1, 2)
    )
    warm = bench.sample(sampler, seed=3).sequences[0]
    request, expected = "asample at temperature 0, by seeds 1 and 2", "the same, likeliest tokens"
    if first.tokens != again.tokens:
        return [Finding("greedy", "LIES", request, expected, "other tokens by another seed")]
    likelier = sum(first.logprobs or [0.0]) >= sum(warm.logprobs or [0.0]) - ROUGH
    if not likelier:
        said = "tokens that are less likely than those of temperature 1"
        return [Finding("greedy", "LIES", request, expected, said)]
    return [Finding("greedy", "offers", request, expected, expected)]


def probe_top_k(bench: Bench) -> list[Finding]:
    """Sample with a top-k of 1, which leaves the likeliest token alone."""
    return [_narrowed(bench, "top_k", 1)]


def probe_top_p(bench: Bench) -> list[Finding]:
    """Sample with a top-p that leaves the likeliest token alone."""
    return [_narrowed(bench, "top_p", 1e-6)]


def _narrowed(bench: Bench, name: str, value: float) -> Finding:
    sampler = bench.base_sampler()
    greedy = bench.sample(sampler, temperature=0.0).sequences[0]
    asked: dict[str, Any] = {name: value}
    narrow = bench.sample(sampler, seed=5, **asked).sequences[0]
    request = f"asample at temperature 1 with {name} {value:g}"
    expected = "the tokens of temperature 0"
    same = sum(one == other for one, other in zip(greedy.tokens, narrow.tokens, strict=False))
    if narrow.tokens != greedy.tokens:
        said = f"only {same} of {len(greedy.tokens)} of them"
        return Finding(name, "LIES", request, expected, said)
    by_chance = exp(sum(greedy.logprobs or [0.0]))
    verdict = "unknown" if by_chance > CHANCE else "offers"
    return Finding(name, verdict, request, expected, expected)


def probe_temperature(bench: Bench) -> list[Finding]:
    """Sample at temperature 0.5, and have a trainer of the same weights score the tokens."""
    sampled = bench.sample(bench.base_sampler(), temperature=0.5, seed=5).sequences[0]
    (scored,) = bench.forward(bench.trainer(), [continued(sampled.tokens)])
    request = "asample at temperature 0.5, and a forward pass of what it gave"
    expected = "log-probabilities of temperature 1"
    off = apart(np.array(sampled.logprobs), scored[len(PROMPT) - 1 :])
    verdict = "offers" if off <= ROUGH else "LIES"
    return [Finding("temperature", verdict, request, expected, f"off by up to {off:.2g}", off)]


def _scored(bench: Bench, sampler: PatientSampler, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities of a prompt; empty if the service gives none."""
    asked = {"prompt": tokens, "max_tokens": 1, "include_prompt_logprobs": True}
    found = bench.sample(sampler, what="prompt log-probabilities", **asked).prompt_logprobs_np
    return np.zeros(0) if found is None else np.asarray(found)


def probe_prompts(bench: Bench) -> list[Finding]:
    """Have a prompt scored, by the sampler and by a trainer of the same weights."""
    found = _scored(bench, bench.base_sampler(), [*PROMPT])
    request = "asample with include_prompt_logprobs"
    expected = f"{len(PROMPT)} log-probabilities, those of a forward pass"
    if not len(found):
        return [Finding("prompt_logprobs", "lacks", request, expected, "none")]
    if len(found) != len(PROMPT):
        said = f"{len(found)} log-probabilities"
        return [Finding("prompt_logprobs", "LIES", request, expected, said)]
    (trained,) = bench.forward(bench.trainer(), [datum()])
    off = apart(found[1:].astype(np.float64), trained[: len(PROMPT) - 1])
    verdict = "offers" if off <= ROUGH else "LIES"
    said = f"off by up to {off:.2g}"
    return [Finding("prompt_logprobs", verdict, request, expected, said, off)]


def probe_likeliest(bench: Bench) -> list[Finding]:
    """Ask for the two likeliest tokens of each place of a prompt, whose last is the likeliest."""
    sampler, k = bench.base_sampler(), 2
    asked = {"max_tokens": 1, "include_prompt_logprobs": True, "topk_prompt_logprobs": k}
    greedy = bench.sample(sampler, temperature=0.0, max_tokens=1).sequences[0]
    prompt = [*PROMPT, greedy.tokens[0]]
    answer = bench.sample(sampler, prompt=prompt, what="the likeliest tokens", **asked)
    request = f"asample with topk_prompt_logprobs {k}"
    expected = f"{k} tokens a place, the likeliest first"
    found = answer.topk_prompt_logprobs_np
    if found is None:
        return [Finding("likeliest", "lacks", request, expected, "none")]
    ids, logprobs = found.token_ids, found.logprobs
    if ids.shape != (len(prompt), k):
        said = f"a table of {' by '.join(map(str, ids.shape))} for {len(prompt)} places"
        return [Finding("likeliest", "LIES", request, expected, said)]
    ordered = bool((np.diff(logprobs[1:], axis=1) <= 0).all())
    own = float(answer.prompt_logprobs_np[-1]) if answer.prompt_logprobs_np is not None else None
    first = int(ids[-1, 0]) == greedy.tokens[0]
    first &= own is None or abs(float(logprobs[-1, 0]) - own) <= ROUGH
    if not (ordered and first):
        return [Finding("likeliest", "LIES", request, expected, "other tokens, or another order")]
    return [Finding("likeliest", "offers", request, expected, expected)]


def probe_crowds(bench: Bench) -> list[Finding]:
    """Sample a token for ever more callers at once, until that takes longer than it should."""
    sampler = bench.base_sampler()
    bench.sample(sampler, prompt=SHORT, max_tokens=1)
    seconds = dict[int, float]()
    slows = None
    for crowd in CROWDS:
        began = time.monotonic()
        asked = [bench.ask(sampler, prompt=SHORT, max_tokens=1, seed=n) for n in range(crowd)]
        for one in asked:
            bench.wait(one, "sampling for a crowd")
        seconds[crowd] = time.monotonic() - began
        if seconds[crowd] > SLOWER * seconds[CROWDS[0]]:
            slows = slows or crowd
    told = ", ".join(f"{crowd} in {1000 * took:.0f} ms" for crowd, took in seconds.items())
    at = f"; slower from {slows} on" if slows else ""
    request = f"{', '.join(map(str, CROWDS))} calls of one token at once"
    return [Finding("crowd", "offers", request, "all are answered", told + at, slows)]
