"""checkpoint × datums → checkpoint: forward-backward and optimizer step, submitted back to back."""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import numpy as np

from adapters.calls import Sampler
from adapters.tinker.faults import ServiceFailed, ServiceRefused
from adapters.tinker.live_policy import LivePolicy, Saving, UpdateMethod
from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint, Ledger
from tasks.metrics import Metrics, divergence
from tasks.recovery import Rebuilder, RebuiltPolicy, RecordedSteps
from tasks.storage.durability import durable
from tasks.storage.files import read_text, write_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """Measurements of an update.

    `logprobs` are each datum's log-probabilities before the update; `probe_metrics` those of the
    rebuild before it (`RebuiltPolicy`), empty if the client was live.
    """

    logprobs: list[np.ndarray]
    probe_metrics: dict[str, float]


@dataclass
class PolicyUpdater:
    """The one owner of a policy's training client, to which no other process can attach.

    It knows the step of its live weights. The weights of any other step are rebuilt: the last
    state saved before that step, and the recorded datums since, each applied once.
    `probe_tolerance` bounds how far rebuilt weights may be off the recorded log-probabilities.
    """

    service: Service
    ledger: Ledger
    recorded: RecordedSteps
    ttl_seconds: int | None
    probe_tolerance: float | None = None
    _live: LivePolicy | None = field(default=None, init=False)
    _rebuilt: RebuiltPolicy | None = field(default=None, init=False)
    """The live client's rebuild, as long as no update has proved it."""
    _step: int = field(default=-1, init=False)

    def make_initial(self) -> Checkpoint:
        """Return checkpoint 0, the untrained LoRA; make and save it if the ledger has none."""
        if self.ledger.last() is not None:
            return self.ledger.at(0)
        live = self._rebuilder().untrained()
        saving = live.save("00000", self.ttl_seconds, with_state=True)
        checkpoint = _saved(live, 0, saving)
        self.ledger.add(checkpoint)
        self._live, self._rebuilt, self._step = live, None, 0
        return checkpoint

    def sampler(self, checkpoint: Checkpoint) -> Sampler:
        """Return a sampler of a checkpoint; weights that are gone are rebuilt and saved again."""
        try:
            return self.service.sampler(checkpoint.sampler)
        except ServiceRefused as error:
            log.warning("%s. The weights of checkpoint %d are made again", error, checkpoint.step)
        live = self._at(checkpoint.step)
        name = f"{checkpoint.version}-{token_hex(3)}"
        made = _saved(live, checkpoint.step, live.save(name, self.ttl_seconds, with_state=False))
        self.ledger.add(Checkpoint(made.step, made.sampler, checkpoint.state))
        return self.service.sampler(made.sampler)

    def update(self, step: int, method: UpdateMethod, *, with_state: bool) -> Update:
        """Make checkpoint `step` + 1 from checkpoint `step` and the recorded datums of the step.

        A step without datums keeps the weights. An update that fails leaves no live client behind,
        since whether the service applied it is then unknown.
        """
        batch = self.recorded.batch(step)
        was_live = self._is_at(step)
        live = self._at(step)
        rebuilt, self._live, self._rebuilt = self._rebuilt, None, None
        try:
            if rebuilt is not None:
                rebuilt.probe(batch)
            self.ledger.begin(step + 1)
            submitted = live.submit(step, batch.datums, method)
            saving = live.save(f"{step + 1:05d}", self.ttl_seconds, with_state=with_state)
            result = live.result(submitted)
            if rebuilt is not None:
                rebuilt.check_optimizer_step(result)
            self.ledger.applied(step + 1)
            self.ledger.add(_saved(live, step + 1, saving))
        except ServiceRefused as error:
            if was_live and error.missing:  # the service forgot the client, which can be rebuilt
                raise ServiceFailed(f"{error}. The training client is rebuilt") from error
            raise
        self._live, self._step = live, step + 1
        return Update(result.logprobs, rebuilt.probe_metrics if rebuilt else {})

    def _is_at(self, step: int) -> bool:
        return self._live is not None and self._step == step

    def _at(self, step: int) -> LivePolicy:
        if self._live is None or self._step != step:
            self._rebuilt = self._rebuilder().rebuild(step)
            self._live, self._step = self._rebuilt.live, step
        return self._live

    def _rebuilder(self) -> Rebuilder:
        return Rebuilder(self.service, self.ledger, self.recorded, self.probe_tolerance)


def write_update(
    path: Path,
    updater: PolicyUpdater,
    step: int,
    datums: Path,
    method: UpdateMethod,
    with_state: bool,
) -> None:
    """Update a policy on the datums of a step, and write what the update measured."""
    started = time.monotonic()
    update = updater.update(step, method, with_state=with_state)
    seconds = {"seconds/training": time.monotonic() - started}
    measured = divergence(datums, update.logprobs)
    write_text(path, json.dumps({**measured, **update.probe_metrics, **seconds}))


update_policy = durable("update_policy", write_update)
"""checkpoint × datums → checkpoint, of one policy."""


def read_update(path: Path) -> Metrics:
    """Read what an update measured, without the probe of a rebuild."""
    measured = json.loads(read_text(path))
    return {name: value for name, value in measured.items() if not name.startswith("probe/")}


def _saved(live: LivePolicy, step: int, saving: Saving) -> Checkpoint:
    sampler, state = live.saved(step, saving)
    return Checkpoint(step, sampler, state)
