"""Rebuilding of a policy: a saved state and the recorded datums after it → a training client.

The rebuilt client is probed: it must give the log-probabilities that were recorded when it was
sampled, and its optimizer must count the steps that the datums say it has taken.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
from tinker import TrainingClient

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.live_policy import LivePolicy, UpdateResult
from ratchet.adapters.tinker.service import Service, ServiceRefused
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recovery.recorded_steps import Evidence, RecordedSteps, StepDatums

log = logging.getLogger(__name__)


class ProbeError(UserError):
    """Refusal of a rebuilt policy that differs from the recorded policy."""


@dataclass
class RebuiltPolicy:
    """A rebuilt training client, and the measurements that verify it.

    `probe_metrics` go into the update's file: `probe/max_difference` is the largest difference to
    recorded log-probabilities, `probe/optimizer_step` the count that the optimizer gave at its
    first step. `optimizer_steps` is how many steps it must have taken, if that is known; log-
    probabilities may differ by `tolerance`, or by any amount if it is None.
    """

    live: LivePolicy
    origin: str
    """Source of the rebuild, in words."""
    optimizer_steps: int | None
    tolerance: float | None
    probe_metrics: dict[str, float] = field(default_factory=dict)
    _stepped: bool = False

    def probe(self, datums: StepDatums, evidence: Evidence | None) -> None:
        """Compare with what was recorded, before anything is applied."""
        if evidence is None:
            log.warning("step %d has no datum to probe the rebuilt weights with", datums.step)
        else:
            loss = datums.method.terms(datums.step)[0].service_loss()
            logprobs = self.live.probe(datums.step, evidence.datum, loss)
            self._compare(datums.step, evidence, logprobs)

    def apply(self, datums: StepDatums) -> None:
        """Apply recorded datums again, as they were applied before."""
        result = self.live.result(self.live.submit(datums.step, datums.request))
        if datums.evidence is not None:
            self._compare(datums.step, datums.evidence, result.logprobs[0][0])
        self.check_optimizer_step(result)

    def check_optimizer_step(self, result: UpdateResult) -> None:
        """Refuse (ProbeError) an optimizer whose step count does not follow the recorded steps."""
        if self._stepped or not result.logprobs:
            return
        self._stepped, taken, known = True, result.optimizer_step, self.optimizer_steps
        if taken is None or known is None:
            log.warning("whether the optimizer %s kept its moments is unknown", self.origin)
            return
        self.probe_metrics["probe/optimizer_step"] = taken
        if taken != known + 1:
            raise ProbeError(
                f"the optimizer {self.origin} says that its first step is number {taken}, but the "
                f"recorded updates make it number {known + 1}: its moments are not those of this "
                "run. The update is not recorded; go on from an earlier checkpoint with "
                "`ratchet fork`"
            )

    def _compare(self, step: int, evidence: Evidence, logprobs: np.ndarray) -> None:
        difference = evidence.difference(logprobs)
        largest = max(difference, self.probe_metrics.get("probe/max_difference", 0.0))
        self.probe_metrics["probe/max_difference"] = largest
        log.info("%s: log-probabilities of step %d off by %.3g", self.origin, step, difference)
        if self.tolerance is not None and not difference <= self.tolerance:
            raise ProbeError(
                f"the policy {self.origin} does not give the log-probabilities that were recorded "
                f"at step {step}: those of a datum are off by up to {difference:.3g}, and "
                f"checkpoints.probe_tolerance allows {self.tolerance:g}. Nothing was applied. Go "
                "on from an earlier checkpoint with `ratchet fork` or, if the service is known to "
                "train in another precision than it samples, give a larger tolerance"
            )


@dataclass(frozen=True)
class Rebuilder:
    """Rebuilder of a policy, from the newest state that loads and the datums recorded after it."""

    service: Service
    ledger: Ledger
    recorded: RecordedSteps
    tolerance: float | None

    def initial(self) -> LivePolicy:
        """Make the weights of checkpoint 0: the start or, without one, the LoRA of its seed."""
        client, start = self.service.client, self.recorded.policy.start
        if start is not None:
            return self._client_of(start.state, with_optimizer=start.with_optimizer)
        lora, create = vars(self.recorded.policy.lora), client.create_lora_training_client
        return self._live(self.service.create("a new training client", create, **lora))

    def rebuild(self, step: int) -> RebuiltPolicy:
        """Rebuild the policy after `step` updates, on a client that no request has failed on."""
        doubtful = self.ledger.in_doubt()
        if doubtful is not None:
            log.warning("checkpoint %d was begun but never saved: it is made again", doubtful)
        live, loaded, origin = self._load(step)
        taken = self.recorded.optimizer_steps(loaded)
        rebuilt = RebuiltPolicy(live, origin, taken, self.tolerance)
        for passed in range(loaded, step):
            log.info("applying the recorded datums of step %d again", passed)
            rebuilt.apply(self.recorded.restored(passed))
        return rebuilt

    def _load(self, step: int) -> tuple[LivePolicy, int, str]:
        for saved in self.ledger.states(step):
            assert saved.state is not None
            try:
                live = self._client_of(saved.state, with_optimizer=True)
            except ServiceRefused as error:
                log.warning("%s. An older state is taken, and more steps are applied again", error)
                continue
            return live, saved.step, f"rebuilt from the saved state of checkpoint {saved.step}"
        start, seed = self.recorded.policy.start, self.recorded.policy.lora.seed
        first = f"the start {start.state}" if start else f"the untrained LoRA of seed {seed}"
        log.warning("no saved state is left: every step is applied again to %s", first)
        return self.initial(), 0, f"rebuilt from {first}"

    def _client_of(self, state: str, *, with_optimizer: bool) -> LivePolicy:
        client = self.service.client
        load = (
            client.create_training_client_from_state_with_optimizer
            if with_optimizer
            else client.create_training_client_from_state
        )
        return self._live(self.service.create(f"the state {state}", load, state))

    def _live(self, client: TrainingClient) -> LivePolicy:
        name = self.recorded.policy.name
        task = "updates" if name == POLICY else f"policies/{name}/updates"
        return LivePolicy(self.service, client, task)
