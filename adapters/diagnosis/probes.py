"""What a service of the Tinker API is found to offer, by the values that it gives: its probes."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import exp, isfinite

import numpy as np
import tinker
from tinker import TrainingClient

from ratchet.adapters.diagnosis.bench import (
    PROMPT,
    ROUGH,
    TARGETS,
    Bench,
    Finding,
    NoClient,
    Verdict,
    continued,
    datum,
    datum_of,
)
from ratchet.adapters.errors import PassingError
from ratchet.adapters.tinker.costs import Work
from ratchet.adapters.tinker.engines import HOSTED
from ratchet.adapters.tinker.live_policy import apart
from ratchet.adapters.tinker.service import (
    SDK_ERRORS,
    Service,
    ServiceBroken,
    ServiceRefused,
    translate_error,
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
EXACT = 1e-4
"""Most difference of the log-probabilities of a sampler and a trainer that compute alike; it is the
default of a recipe's checkpoints.probe_tolerance."""
COMPANY = 8
GENTLE = 0.003
"""Learning rate of a step that another one undoes."""
PROBE_KEPT_SECONDS = 7200
MET = 0.05
"""Share of the distance between two ways below which they have met."""
AWAY = [-1.0] * len(TARGETS)
"""Weights of a loss that undoes what was learnt: without its moments a step of Adam is whole."""
END_SECONDS = 5.0
OTHER_PARTS = (LookupError, ValueError, TypeError)
"""Errors of a probe whose answers have other parts than such answers have."""


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a service of a base model, by one version of the SDK."""

    url: str
    base: str
    sdk: str
    findings: tuple[Finding, ...]
    seconds: float
    tokens: int

    def of(self, name: str) -> Finding | None:
        return next((one for one in self.findings if one.name == name), None)


def probe_wire(bench: Bench) -> list[Finding]:
    """Have one token sampled, and one pass computed, and both answers read by the SDK."""
    bench.sample(bench.base_sampler(), max_tokens=1)
    expected = f"an answer that SDK {tinker.__version__} reads"
    older = bench.service.server.older_sdk
    said = f"one, by a bridge from the wire of SDK {older}" if older else expected
    return [Finding("wire", "offers", expected, said)]


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


def probe_sampler(bench: Bench) -> list[Finding]:
    """Compare the log-probabilities of a sampler with those of its trainer, after a step."""
    client = bench.trainer()
    bench.learn(client, datum(), learning_rate=GENTLE)
    saving = client.save_weights_for_sampler("doctor", ttl_seconds=PROBE_KEPT_SECONDS)
    sampler = bench.service.sampler(bench.wait(saving, "the sampler's weights").path)
    alone = bench.sample(sampler, seed=3, max_tokens=6).sequences
    with_others = [bench.ask(sampler, COMPANY // 2, seed=seed, max_tokens=6) for seed in (4, 5)]
    crowd = [one for asked in with_others for one in bench.wait(asked, "sampling").sequences]
    found = []
    for name, sequences in (("logprobs", alone), ("company", crowd)):
        trained = bench.forward(client, [continued(one.tokens) for one in sequences])
        sampled = np.concatenate([np.array(one.logprobs or []) for one in sequences])
        own = np.concatenate([one[len(PROMPT) - 1 :] for one in trained]).astype(np.float64)
        found.append(_compare(name, sampled, own))
    return found


def _compare(name: str, sampled: np.ndarray, trained: np.ndarray) -> Finding:
    expected = f"the same log-probabilities, within {EXACT:g}"
    if not sampled.size:
        return Finding(name, "lacks", expected, "none")
    off = apart(sampled, trained)
    kl = float((sampled - trained).mean()) if sampled.shape == trained.shape else float("nan")
    said = f"apart by up to {off:.2g}, self-KL {kl:.1e}"
    verdict = "offers" if off <= EXACT else "LIES" if off > ROUGH else "lacks"
    return Finding(name, verdict, expected, said, off if isfinite(off) else None)


def probe_state(bench: Bench) -> list[Finding]:
    """Go on from a saved state with its optimizer and without, and beside the client that saved it.

    The next step undoes what the one before it learnt, which the optimizer's moments slow down.
    """
    client = bench.trainer()
    bench.learn(client, datum(), learning_rate=GENTLE)
    saving = client.save_state("doctor", ttl_seconds=PROBE_KEPT_SECONDS)
    path = bench.wait(saving, "the training state").path
    (at_save,) = bench.forward(client, [datum()])
    straight = _undo(bench, client)
    with bench.beside() as other:
        plain = other.loaded(path, with_optimizer=False)
        (loaded,) = other.forward(plain, [datum()])
        fresh = _undo(other, plain)
    between = apart(straight, fresh)
    off = apart(loaded, at_save)
    weights = Finding.compared(
        "state",
        "the log-probabilities of the client that saved it",
        f"off by up to {off:.2g}",
        alike=off <= max(EXACT, MET * between),
    )
    left_out = Finding.compared(
        "no_moments",
        "a step as of a new optimizer",
        f"off by {between:.2g} from that of the client that saved it",
        alike=between > EXACT,
    )
    return [weights, left_out, _probe_optimizer(bench, path, straight, fresh)]


def _probe_optimizer(bench: Bench, path: str, straight: np.ndarray, fresh: np.ndarray) -> Finding:
    expected = "the weights of going on without a stop"
    try:
        with bench.beside() as other:
            resumed = _undo(other, other.loaded(path, with_optimizer=True))
    except ServiceRefused as error:
        return Finding("optimizer", "lacks", expected, str(error))
    off, between = apart(resumed, straight), apart(straight, fresh)
    said = f"off by {off:.2g}; without moments by {between:.2g}"
    return Finding.compared("optimizer", expected, said, alike=off <= max(EXACT, MET * between))


def _undo(bench: Bench, client: TrainingClient) -> np.ndarray:
    bench.learn(client, datum(AWAY), learning_rate=GENTLE)
    (found,) = bench.forward(client, [datum()])
    return found


def probe_ttl(bench: Bench) -> list[Finding]:
    """Save weights for a time, and look when the service says that they expire."""
    client = bench.trainer()
    saving = client.save_weights_for_sampler("doctor-ttl", ttl_seconds=PROBE_KEPT_SECONDS)
    path = bench.wait(saving, "weights that expire").path
    expected = f"weights that expire {PROBE_KEPT_SECONDS} s later"
    try:
        listing = bench.service.rest().list_checkpoints(client.model_id)
        saved = bench.wait(listing, "the saved weights").checkpoints
    except ServiceRefused as error:
        said = f"it is accepted, and the weights are not listed: {error}"
        return [Finding("ttl", "unknown", expected, said)]
    ends = [one.expires_at for one in saved if one.tinker_path == path]
    if not ends or ends[0] is None:
        said = "weights without an end" if ends else "weights that are not listed"
        return [Finding("ttl", "LIES" if ends else "unknown", expected, said)]
    left = (ends[0] - datetime.now(UTC)).total_seconds()
    near = abs(left - PROBE_KEPT_SECONDS) < PROBE_KEPT_SECONDS / 10
    said = f"weights that expire in {left:.0f} s"
    return [Finding.compared("ttl", expected, said, alike=near)]


def probe_end(bench: Bench) -> list[Finding]:
    """End a session; ask its training client once more, and sample by the weights that it saved."""
    with bench.beside() as other:
        client, saver = other.trainer(), other.trainer()
        saving = saver.save_weights_for_sampler("doctor-end", ttl_seconds=PROBE_KEPT_SECONDS)
        saved = other.wait(saving, "the sampler's weights").path
        info, refused = client.get_info(), _end(other.service)
    expected = "a training client that is gone"
    if refused:
        ended = Finding("session_end", "lacks", expected, refused)
        return [ended, Finding("outlives", "unknown", "", "the session has no end")]
    kept = _sampled_after(bench, saved)
    later = TrainingClient(bench.service.client.holder, 0, client.model_id, info=info)
    try:
        bench.forward(later, [datum()])
    except ServiceRefused:
        return [Finding("session_end", "offers", expected, expected), kept]
    said = "a training client that still answers"
    return [Finding("session_end", "LIES", expected, said), kept]


def _sampled_after(bench: Bench, path: str) -> Finding:
    """Sample by weights whose session has ended."""
    expected = "a token"
    try:
        sampler = bench.service.sampler(path)
        bench.sample(sampler, max_tokens=1)
    except ServiceRefused as error:
        return Finding("outlives", "lacks", expected, str(error))
    return Finding("outlives", "offers", expected, expected)


def _end(service: Service) -> str:
    """End a session; return what the service says if it refuses that."""

    def end() -> None:
        service.client.close("success").future().result(END_SECONDS)

    with ThreadPoolExecutor(1) as ending:
        try:
            ending.submit(end).result()
        except (*SDK_ERRORS, TimeoutError) as error:
            return f"{translate_error(error, 'the end of a session')}"
    return ""


SERVICE_PROBES: Mapping[tuple[str, ...], Callable[[Bench], list[Finding]]] = {
    ("wire",): probe_wire,
    ("seeds",): probe_seeds,
    ("logprobs", "company"): probe_sampler,
    ("prompt_logprobs",): probe_prompts,
    ("likeliest",): probe_likeliest,
    ("clip",): probe_clip,
    ("grad_clip",): probe_grad_clip,
    ("targets",): probe_targets,
    ("state", "no_moments", "optimizer"): probe_state,
    ("ttl",): probe_ttl,
    ("session_end", "outlives"): probe_end,
}
"""Names of findings → the probe that makes them."""
TITLES: Mapping[str, str] = {
    "wire": "answers that the SDK reads",
    "seeds": "seeds",
    "logprobs": "log-probabilities, alone",
    "company": "log-probabilities, in company",
    "prompt_logprobs": "log-probabilities of a prompt",
    "likeliest": "likeliest tokens of a prompt",
    "clip": "clip thresholds",
    "grad_clip": "grad_clip_norm",
    "targets": "several targets a place",
    "state": "state without the optimizer",
    "no_moments": "state that leaves the moments out",
    "optimizer": "state with the optimizer",
    "ttl": "ttl_seconds",
    "session_end": "end of a session",
    "outlives": "weights of a session that has ended",
}
"""Names of findings → what they are called in a table."""


def examine(
    service: Service, base: str, names: Collection[str] | None = None, *, strict: bool = False
) -> Diagnosis:
    """Probe what a service offers: the findings of these `names`, or all.

    A probe that cannot be made, for reasons that may pass or because a client is refused, is a
    finding too; `strict` raises its error.
    """
    began, found, spent = time.monotonic(), list[Finding](), list[Work]()
    for named, probe in SERVICE_PROBES.items():
        if names is None or not {*names}.isdisjoint(named):
            found += _ask(Bench(service, base, spent), named, probe, strict)
    return Diagnosis(
        service.server.url or HOSTED,
        base,
        tinker.__version__,
        tuple(one for one in found if names is None or one.name in names),
        time.monotonic() - began,
        sum(work.prefill + work.sampled + work.trained for work in spent),
    )


def _ask(
    bench: Bench, named: Sequence[str], probe: Callable[[Bench], list[Finding]], strict: bool
) -> list[Finding]:
    """Make a probe in a session of its own; a refusal is a finding."""
    verdict: Verdict = "lacks"
    try:
        with bench.beside() as own:
            return probe(own)
    except (PassingError, ServiceRefused, ServiceBroken) as error:
        passes = isinstance(error, PassingError)
        if strict and (passes or isinstance(error, NoClient)):
            raise
        verdict, said = "unknown" if passes else "lacks", str(error)
    except OTHER_PARTS as error:
        said = f"an answer with other parts: {type(error).__name__}: {error}"
    return [Finding(name, verdict, "", said) for name in named]
