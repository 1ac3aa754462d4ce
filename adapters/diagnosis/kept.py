"""Probes of weights that are sampled, saved and loaded, and of the end of a session."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import numpy as np
import tinker
from tinker import Datum, TrainingClient

from adapters.diagnosis.bench import (
    PROMPT,
    ROUGH,
    TARGETS,
    Bench,
    Finding,
    apart,
    continued,
    datum,
)
from adapters.tinker.service import SDK_ERRORS, Service, ServiceRefused, translate_error

EXACT = 1e-4
"""Most difference of the log-probabilities of a sampler and a trainer that compute alike; it is the
default of a recipe's checkpoints.probe_tolerance."""
COMPANY = 8
PROBE_KEPT_SECONDS = 7200
MET = 0.05
"""Share of the distance between two ways below which they have met."""
AWAY = [-1.0] * len(TARGETS)
"""Weights of a loss that undoes what was learnt: without its moments a step of Adam is whole."""
MOST_CLIENTS = 4
END_SECONDS = 5.0


def probe_sampler(bench: Bench) -> list[Finding]:
    """Compare the log-probabilities of a sampler with those of its trainer, after a step."""
    client = bench.trainer()
    _learn(bench, client)
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
        found.append(_compare(name, len(sequences), sampled, own))
    return found


def _compare(name: str, sequences: int, sampled: np.ndarray, trained: np.ndarray) -> Finding:
    request = f"asample of {sequences} at once at temperature 1, and a forward pass of what it gave"
    expected = f"the same log-probabilities, within {EXACT:g}"
    if not sampled.size:
        return Finding(name, "lacks", request, expected, "none")
    off = apart(sampled, trained)
    kl = float((sampled - trained).mean()) if sampled.shape == trained.shape else float("nan")
    rounded = ", rounded to bfloat16" if off > EXACT and _is_rounded(sampled) else ""
    said = f"apart by up to {off:.2g}, self-KL {kl:.1e}{rounded}"
    verdict = "offers" if off <= EXACT else "LIES" if off > ROUGH else "lacks"
    return Finding(name, verdict, request, expected, said, off)


def _is_rounded(logprobs: np.ndarray) -> bool:
    """Tell whether numbers have the 8 bits of a bfloat16."""
    bits = logprobs.astype(np.float32).view(np.uint32)
    return not (bits & 0xFFFF).any()


def probe_state(bench: Bench) -> list[Finding]:
    """Go on from a saved state with its optimizer and without, and beside the client that saved it.

    The next step undoes what the one before it learnt, which the optimizer's moments slow down.
    """
    client = bench.trainer()
    _learn(bench, client)
    saving = client.save_state("doctor", ttl_seconds=PROBE_KEPT_SECONDS)
    path = bench.wait(saving, "the training state").path
    (at_save,) = bench.forward(client, [datum()])
    straight = _undo(bench, client)
    with bench.beside() as other:
        plain = other.loaded(path, with_optimizer=False)
        (loaded,) = other.forward(plain, [datum()])
        fresh = _undo(other, plain)
    between = apart(straight, fresh)
    request = "save_state, and create_training_client_from_state"
    expected, off = "the log-probabilities of the client that saved it", apart(loaded, at_save)
    alike = off <= max(EXACT, MET * between)
    weights = Finding(
        "state",
        "offers" if alike else "LIES",
        request,
        expected,
        f"off by up to {off:.2g}",
        off,
    )
    left_out = Finding(
        "no_moments",
        "offers" if between > EXACT else "LIES",
        f"{request}, and one more step",
        "a step as of a new optimizer",
        f"off by {between:.2g} from that of the client that saved it",
        between,
    )
    return [weights, left_out, _probe_optimizer(bench, path, straight, fresh)]


def _probe_optimizer(bench: Bench, path: str, straight: np.ndarray, fresh: np.ndarray) -> Finding:
    request = "create_training_client_from_state_with_optimizer, and one more step"
    expected = "the weights of going on without a stop"
    try:
        with bench.beside() as other:
            resumed = _undo(other, other.loaded(path, with_optimizer=True))
    except ServiceRefused as error:
        return Finding("optimizer", "lacks", request, expected, str(error))
    off, between = apart(resumed, straight), apart(straight, fresh)
    said = f"off by {off:.2g}; without moments by {between:.2g}"
    if off <= max(EXACT, MET * between):
        return Finding("optimizer", "offers", request, expected, said, off)
    return Finding("optimizer", "LIES", request, expected, said, off)


def _learn(bench: Bench, client: TrainingClient) -> None:
    _move(bench, client, datum())


def _undo(bench: Bench, client: TrainingClient) -> np.ndarray:
    _move(bench, client, datum(AWAY))
    (found,) = bench.forward(client, [datum()])
    return found


def _move(bench: Bench, client: TrainingClient, learnt: Datum) -> None:
    bench.wait(bench.submit(client, [learnt]), "forward_backward")
    bench.step(client, learning_rate=0.003)


def probe_ttl(bench: Bench) -> list[Finding]:
    """Save weights for a time, and look when the service says that they expire."""
    client = bench.trainer()
    saving = client.save_weights_for_sampler("doctor-ttl", ttl_seconds=PROBE_KEPT_SECONDS)
    path = bench.wait(saving, "weights that expire").path
    request = f"save_weights_for_sampler with ttl_seconds {PROBE_KEPT_SECONDS}"
    expected = f"weights that expire {PROBE_KEPT_SECONDS} s later"
    try:
        listing = bench.service.rest().list_checkpoints(client.model_id)
        saved = bench.wait(listing, "the saved weights").checkpoints
    except ServiceRefused as error:
        said = f"it is accepted, and the weights are not listed: {error}"
        return [Finding("ttl", "unknown", request, expected, said)]
    ends = [one.expires_at for one in saved if one.tinker_path == path]
    if not ends or ends[0] is None:
        said = "weights without an end" if ends else "weights that are not listed"
        return [Finding("ttl", "LIES" if ends else "unknown", request, expected, said)]
    left = (ends[0] - datetime.now(UTC)).total_seconds()
    near = abs(left - PROBE_KEPT_SECONDS) < PROBE_KEPT_SECONDS / 10
    said = f"weights that expire in {left:.0f} s"
    return [Finding("ttl", "offers" if near else "LIES", request, expected, said, left)]


def probe_end(bench: Bench) -> list[Finding]:
    """End a session; ask its training client once more, and sample by the weights that it saved."""
    with bench.beside() as other:
        client, saver = other.trainer(), other.trainer()
        saving = saver.save_weights_for_sampler("doctor-end", ttl_seconds=PROBE_KEPT_SECONDS)
        saved = other.wait(saving, "the sampler's weights").path
        info, refused = client.get_info(), _end(other.service)
    request = "sessions/…/finish, then a forward pass of the session's training client"
    expected = "a training client that is gone"
    if refused:
        ended = Finding("session_end", "lacks", request, expected, refused)
        return [ended, Finding("outlives", "unknown", "", "an answer", "the session has no end")]
    kept = _sampled_after(bench, saved)
    later = TrainingClient(bench.service.client.holder, 0, client.model_id, info=info)
    try:
        bench.forward(later, [datum()])
    except ServiceRefused:
        return [Finding("session_end", "offers", request, expected, expected), kept]
    said = "a training client that still answers"
    return [Finding("session_end", "LIES", request, expected, said), kept]


def _sampled_after(bench: Bench, path: str) -> Finding:
    """Sample by weights whose session has ended."""
    request, expected = "asample of a token by weights whose session has ended", "a token"
    try:
        sampler = bench.service.sampler(path)
        bench.sample(sampler, max_tokens=1)
    except ServiceRefused as error:
        return Finding("outlives", "lacks", request, expected, str(error))
    return Finding("outlives", "offers", request, expected, expected)


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


def probe_slots(bench: Bench) -> list[Finding]:
    """Create a few training clients at once."""
    clients = list[tinker.TrainingClient]()
    request = f"{MOST_CLIENTS} training clients in one session"
    expected = f"{MOST_CLIENTS} or more"
    for _ in range(MOST_CLIENTS):
        try:
            clients.append(bench.trainer())
        except ServiceRefused as error:
            said = f"{len(clients)}: {error}"
            verdict = "offers" if len(clients) > 1 else "lacks"
            return [Finding("slots", verdict, request, expected, said, len(clients))]
    return [Finding("slots", "offers", request, expected, expected, MOST_CLIENTS)]
