"""Probes of weights that are sampled, saved and loaded, and of the end of a session."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from math import isfinite

import numpy as np
from tinker import TrainingClient

from ratchet.adapters.diagnosis.bench import (
    PROMPT,
    ROUGH,
    TARGETS,
    Bench,
    Finding,
    apart,
    continued,
    datum,
)
from ratchet.adapters.tinker.service import SDK_ERRORS, Service, ServiceRefused, translate_error

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
    rounded = ", rounded to bfloat16" if off > EXACT and _is_rounded(sampled) else ""
    said = f"apart by up to {off:.2g}, self-KL {kl:.1e}{rounded}"
    verdict = "offers" if off <= EXACT else "LIES" if off > ROUGH else "lacks"
    return Finding(name, verdict, expected, said, off if isfinite(off) else None)


def _is_rounded(logprobs: np.ndarray) -> bool:
    """Tell whether numbers have the 8 bits of a bfloat16."""
    bits = logprobs.astype(np.float32).view(np.uint32)
    return not (bits & 0xFFFF).any()


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
