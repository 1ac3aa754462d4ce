"""checkpoint × datums → checkpoint: forward-backward and optimizer step, submitted back to back."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa

from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.live_policy import LivePolicy, Pass, Saving, SubmittedUpdate, apart
from ratchet.adapters.tinker.service import PatientSampler, Service, ServiceFailed, ServiceRefused
from ratchet.durable.process import collect_garbage
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.datums import columns_of, to_datums
from ratchet.tasks.metrics import (
    DATUM_LOGPROBS,
    measure_divergence,
    measure_loss,
    name_expert,
    sum_logprobs,
)
from ratchet.tasks.recording.step_log import Metrics
from ratchet.tasks.recovery.recorded_steps import (
    FIRST_LOGPROBS,
    Evidence,
    Rebuilder,
    RebuiltPolicy,
    RecordedSteps,
    StepDatums,
)
from ratchet.tasks.scoring import score_tokens
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import read_json, write_json

MOST_SCORED = 4
"""Datums of a step that are scored."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Submitted:
    """An update whose passes, optimizer steps and saves the service has been asked for."""

    datums: StepDatums
    update: SubmittedUpdate
    saving: Saving


@dataclass(frozen=True)
class StepUpdate:
    """The update of a step.

    `make` returns its datums' files, None if there are none; `pending`, what it waits for. They are
    made of the `spans`, by which Prefect links the update's task run to those of the batches.
    """

    step: int
    make: Callable[[], Sequence[Path] | None]
    pending: Callable[[], Sequence[Future[Any]]] = list
    spans: Sequence[Path] = ()


@dataclass(frozen=True)
class Update:
    """Measurements of an update.

    `logprobs` has the log-probabilities of each of the `datums` of each term in its first pass.
    `checks` has what the rebuild before it measured (`RebuiltPolicy`), nothing if the client was
    live, and compares the first update with its sampler.
    """

    datums: StepDatums
    logprobs: list[list[np.ndarray]]
    checks: dict[str, float]


class PolicyUpdater:
    """The only owner of a policy's training client; no other process can attach to that client.

    It knows the step of its live weights. The weights of any other step are rebuilt: the last state
    saved before that step, and the recorded datums since, each applied once. The next update is
    submitted before the result of the update before it is awaited. If the client is given up, the
    next update is lost with it, and is made again from the recorded datums. `saves_state` says
    which checkpoints save the training state, and `probe_tolerance` bounds how far rebuilt weights
    may be off the recorded log-probabilities.
    """

    def __init__(
        self,
        service: Service,
        ledger: Ledger,
        recorded: RecordedSteps,
        saves_state: Callable[[int], bool],
        ttl_seconds: int | None = None,
        probe_tolerance: float | None = None,
    ) -> None:
        self.service = service
        self.ledger = ledger
        self.recorded = recorded
        self._saves_state = saves_state
        self._ttl_seconds = ttl_seconds
        self.probe_tolerance = probe_tolerance
        self._live: LivePolicy | None = None
        self._rebuilt: RebuiltPolicy | None = None
        """The rebuild behind the live client, until its first update is checked."""
        self._step = -1
        self._ahead: _Submitted | None = None
        """The update in flight, if any."""
        self._owning = RLock()
        """Lock of the live client: a batch whose sampler is gone may ask during an update."""

    def make_initial(self) -> Checkpoint:
        """Return checkpoint 0, the initial weights; make and save it if it is not in the ledger."""
        if self.ledger.checkpoints():
            return self.ledger.at(0)
        live = self._rebuilder().initial()
        saving = live.save(self.ledger.name(0), self._ttl_seconds, with_state=True)
        checkpoint = _saved(live, 0, saving)
        self.ledger.add(checkpoint)
        self._live, self._rebuilt, self._step = live, None, 0
        return checkpoint

    def sampler(self, step: int) -> PatientSampler:
        """Return a sampler of a checkpoint; lost weights are made again.

        Weights may be lost before the sampler is made, or while it is asked.
        """
        opened = self._open(step)
        opened.reopen = partial(self._open, step, checked=True)
        return opened

    def _open(self, step: int, *, checked: bool = False) -> PatientSampler:
        """Open a sampler, `checked` by a token: some services refuse lost weights only then."""
        known = self.ledger.find(step)
        try:
            if known is not None:
                opened = self.service.sampler(known.sampler)
                if checked:
                    opened.check()
                return opened
            log.warning("the ledger has no checkpoint %d: it is made again", step)
        except ServiceRefused as error:
            log.warning("%s. The weights of checkpoint %d are made again", error, step)
        return self.service.sampler(self.make_again(step, with_state=False).sampler)

    def make_again(self, step: int, *, with_state: bool) -> Checkpoint:
        """Rebuild a checkpoint, and save its weights, with its training state or without."""
        known = self.ledger.find(step)
        with self._client(step) as live:
            name = f"{self.ledger.name(step)}-{token_hex(3)}"
            made = _saved(live, step, live.save(name, self._ttl_seconds, with_state=with_state))
            if made.state is None and known is not None:
                made = replace(made, state=known.state)
            self.ledger.add(made)
        return made

    def keep_state(self) -> None:
        """Save the newest checkpoint's training state, if the live client has it and none is saved.

        A run that stops then continues without applying a step again.
        """
        last = self.ledger.last_step()
        if self._is_at(last) and self.ledger.at(last).state is None:
            self.make_again(last, with_state=True)

    def save_due_state(self) -> None:
        """Save the newest checkpoint's training state, if one is due now and none is saved.

        None was due when its update was submitted, if it has become the run's last one since.
        """
        last = self.ledger.last_step()
        if self._saves_state(last) and self.ledger.at(last).state is None:
            self.make_again(last, with_state=True)

    def accumulate(self, step: int, batch: pa.Table) -> None:
        """Submit a forward-backward pass of some datums of step `step`, whose update is to follow.

        If the client must be rebuilt or probed first, nothing is submitted yet.
        """
        with self._owning:
            if self._live is not None and self._is_at(step) and self._rebuilt is None:
                (term,) = self.recorded.methods.at(step).terms(step)
                datums = to_datums(batch, term.loss, term.settings)
                self._live.accumulate(step, Pass(datums, term.service_loss()))

    def update(
        self,
        step: int,
        paths: Sequence[Path],
        meanwhile: Iterable[Callable[[], object]] = (),
        next_update: StepUpdate | None = None,
    ) -> Update:
        """Train the datums of a step's files by its method: checkpoint `step` becomes `step` + 1.

        While the service computes, the `next_update` is submitted, the calls `meanwhile` are made,
        and what the step has left is collected. A step without datums keeps the weights. An update
        that fails leaves no live client behind.
        """
        with self._owning:
            ahead = self._ahead if self._ahead and self._ahead.datums.step == step else None
            at = step if ahead is None else step + 1
            with self._refusals_explained(at), self._client(at) as live:
                rebuilt, self._rebuilt = self._rebuilt, None
                scored: list[Evidence] = []
                if ahead is None:
                    datums = self.recorded.read(step, paths)
                    recorded, scored = self._evidence(datums, rebuilt)
                    if rebuilt is not None:
                        rebuilt.probe(datums, recorded or next(iter(scored), None))
                    ahead = self._submit(live, datums)
                self._ahead = next_update and self._submit_next(live, ahead.update, next_update)
                for call in (*meanwhile, collect_garbage):
                    call()
                result = live.result(ahead.update)
                if rebuilt is not None:
                    rebuilt.check_optimizer_step(result)
                own = scored if step == 0 else []
                first = [*result.logprobs, []][0]
                checks = compare_sampler(own, first, self.probe_tolerance)
                checks |= rebuilt.probe_metrics if rebuilt else {}
                self.ledger.add(_saved(live, step + 1, ahead.saving))
        return Update(ahead.datums, ahead.datums.first_pass(result.logprobs), checks)

    def _submit(self, live: LivePolicy, datums: StepDatums) -> _Submitted:
        """Submit an update and the saves of its checkpoint to the client of its step."""
        made = datums.step + 1
        self.ledger.begin(made)
        submitted = live.submit(datums.step, datums.request)
        saving = live.save(
            self.ledger.name(made), self._ttl_seconds, with_state=self._saves_state(made)
        )
        self._step = made
        return _Submitted(datums, submitted, saving)

    def _submit_next(
        self, live: LivePolicy, before: SubmittedUpdate, update: StepUpdate
    ) -> _Submitted | None:
        """Submit the next update behind the one before it, if its datums are made in time."""
        live.wait_for(update.pending, before)
        paths = update.make()
        return None if paths is None else self._submit(live, self.recorded.read(update.step, paths))

    def _evidence(
        self, datums: StepDatums, rebuilt: RebuiltPolicy | None
    ) -> tuple[Evidence | None, list[Evidence]]:
        """Return recorded evidence of the weights a step begins with, or else scores by them.

        A live client needs neither, except at its first step.
        """
        if rebuilt is None and datums.step > 0:
            return None, []
        if (recorded := self.recorded.evidence(datums)) is not None:
            return recorded, []
        most = MOST_SCORED if datums.step == 0 else 1
        return None, score_datums(self.service, self.ledger.find(datums.step), datums, most)

    @contextmanager
    def _refusals_explained(self, step: int) -> Iterator[None]:
        """Raise ServiceFailed, which a retry mends, if the service has forgotten the client."""
        was_live = self._is_at(step)
        try:
            yield
        except ServiceRefused as error:
            if was_live and error.missing:
                raise ServiceFailed(f"{error}. The training client is rebuilt") from error
            raise

    @contextmanager
    def _client(self, step: int) -> Iterator[LivePolicy]:
        """Own the client of a step for the block; give the client up if a request fails."""
        with self._owning:
            if not self._is_at(step):
                self._ahead = None
                self._rebuilt = self._rebuilder().rebuild(step)
                self._live, self._step = self._rebuilt.live, step
            live, self._live = self._live, None
            assert live is not None
            try:
                yield live
                self._live = live
            finally:
                if self._live is None:
                    self._ahead = None

    def _is_at(self, step: int) -> bool:
        return self._live is not None and self._step == step

    def _rebuilder(self) -> Rebuilder:
        return Rebuilder(self.service, self.ledger, self.recorded, self.probe_tolerance)


@durable
def update_policy(
    path: Path,
    updater: PolicyUpdater,
    due: StepUpdate,
    meanwhile: Iterable[Callable[[], object]] = (),
    next_update: StepUpdate | None = None,
) -> None:
    """Update a policy on the datums of a step, and write what the update measured.

    The expert's texts, if there is an expert, are the second file of datums. The calls `meanwhile`
    are made while the service computes, and not at all if the update was made before.
    """
    step, datums, started = due.step, due.make() or (), time.monotonic()
    update = updater.update(step, datums, meanwhile, next_update)
    seconds = {"seconds/training": time.monotonic() - started}
    terms, tables = update.datums.method.terms(step), update.datums.tables
    (term, logprobs), *others = zip(terms, update.logprobs, strict=True)
    batch = tables[term.file]
    first = columns_of(batch)
    measured: dict[str, object] = {
        **measure_divergence(batch, logprobs, step),
        **measure_loss(first, logprobs, term.loss, term.settings),
        **sum_logprobs(first, logprobs, term.loss),
    }
    if logprobs:
        measured[FIRST_LOGPROBS] = logprobs[0].tolist()
    for term, logprobs in others:
        if term.file:
            own = columns_of(tables[term.file])
            loss = measure_loss(own, logprobs, term.loss, term.settings)
            measured |= name_expert({**loss, "share": term.factor})
    write_json(path, {**measured, **update.checks, **seconds})


def read_update(path: Path) -> Metrics:
    """Read an update's metrics; skip `probe/…` and the log-probabilities of single datums."""
    measured = read_json(path)
    return {
        name: value
        for name, value in measured.items()
        if not name.startswith("probe/") and name != DATUM_LOGPROBS
    }


def _saved(live: LivePolicy, step: int, saving: Saving) -> Checkpoint:
    sampler, state = live.saved(step, saving)
    return Checkpoint(step, sampler, state)


def score_datums(
    service: Service, checkpoint: Checkpoint | None, datums: StepDatums, most: int
) -> list[Evidence]:
    """Have the sampler of the checkpoint that a step begins with score the step's first datums.

    Datums that no policy sampled have no recorded log-probabilities: the trainer must give the
    sampler's. All scored datums are of the step's first file. There is no evidence if the loss has
    no weights, which tell what is trained, if it has several targets a place, as with a teacher, or
    if the checkpoint is gone.
    """
    scored = [datum for one in datums.request.passes[:1] if one.term == 0 for datum in one.datums]
    scored = scored[:most]
    inputs = [datum.loss_fn_inputs for datum in scored]
    targets = [given["target_tokens"].to_numpy() for given in inputs]
    comparable = all("weights" in given for given in inputs)
    comparable &= all(own.ndim == 1 for own in targets)
    if checkpoint is None or not scored or not comparable:
        return []
    tokens = (
        np.array([*datum.model_input.to_ints(), own[-1]])
        for datum, own in zip(scored, targets, strict=True)
    )
    try:
        sampler = service.sampler(checkpoint.sampler)
        found = score_tokens(sampler.score, tokens, map(len, targets))
        masks = [(given["weights"].to_numpy() != 0).astype(np.int8) for given in inputs]
        return [Evidence(*one) for one in zip(scored, found, masks, strict=True)]
    except ServiceRefused as error:
        log.warning("%s. The first datums of step %d are not scored", error, datums.step)
        return []


def compare_sampler(
    evidence: Sequence[Evidence], logprobs: Sequence[np.ndarray], tolerance: float | None
) -> dict[str, float]:
    """Measure how far the first update's log-probabilities are off the sampler's.

    `sampler/apart` is the largest difference over the trained tokens of the scored datums;
    UserError refuses a difference above the tolerance. `sampler/kl` is the mean of log q - log
    p, q being the sampler. Both are 0 if the service samples what it trains.
    """
    if not evidence:
        return {}
    pairs = [*zip(evidence, logprobs, strict=False)]
    sampler = np.concatenate([one.logprobs[one.mask != 0] for one, _ in pairs])
    trainer = np.concatenate([trained[one.mask != 0] for one, trained in pairs])
    largest = apart(sampler, trainer)
    if tolerance is not None and not largest <= tolerance:
        raise UserError(
            f"the untrained policy gives log-probabilities that are up to {largest:.3g} off those "
            f"of its sampler; checkpoints.probe_tolerance allows {tolerance:g}: the service trains "
            "in another precision than it samples. Give a larger checkpoints.probe_tolerance, if "
            "measures by the sampler may be that rough"
        )
    kl = (sampler.astype(np.float64) - trainer).mean()
    return {"sampler/apart": largest, "sampler/kl": float(kl)}
