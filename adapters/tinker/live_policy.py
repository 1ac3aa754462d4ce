"""A live training client, and what a run asks of it: apply datums, probe one, save."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tinker import AdamParams, APIFuture, Datum, TrainingClient
from tinker.types import (
    ForwardBackwardOutput,
    LossFnType,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

from adapters.tinker.service import PatientSampler, Service

Saving = tuple[APIFuture[SaveWeightsForSamplerResponse], APIFuture[SaveWeightsResponse] | None]
"""Submitted saves: the sampler's weights and, if asked for, the training state."""

STEPS_TAKEN = "step:max"
"""Metric in which an engine reports how many steps its optimizer has taken."""


@dataclass(frozen=True)
class LoraSpec:
    """The trainable weights, in the words of Tinker's `create_lora_training_client`."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True)
class UpdateMethod:
    """Method of an update: the loss with its settings, and the optimizer.

    `by_batch` makes one forward-backward pass for each rollout batch, and otherwise one for all.
    """

    loss: LossFnType
    loss_settings: Mapping[str, float]
    optimizer: AdamParams
    by_batch: bool = False


@dataclass(frozen=True)
class SubmittedUpdate:
    """Forward-backward passes and an optimizer step that were submitted."""

    step: int
    outputs: list[APIFuture[ForwardBackwardOutput]]
    optimizer: APIFuture[OptimStepResponse]


@dataclass(frozen=True)
class UpdateResult:
    """Measurements of an update.

    `logprobs` are each datum's log-probabilities before the update. `optimizer_step` is how many
    steps the optimizer has taken, this one included; None if the service does not report it, or if
    there were no datums and so no step.
    """

    logprobs: list[np.ndarray]
    optimizer_step: int | None


class LivePolicy:
    """A training client.

    No other process can attach to it, and once one of its requests has failed its weights are
    unknown, so a client that failed is dropped.
    """

    def __init__(self, service: Service, client: TrainingClient) -> None:
        self._service = service
        self._client = client
        self._outputs: list[APIFuture[ForwardBackwardOutput]] = []
        """Passes that no optimizer step has followed."""

    def accumulate(self, datums: Sequence[Datum], method: UpdateMethod) -> None:
        """Submit a forward-backward pass, whose gradient is added to those of the passes before."""
        settings = dict(method.loss_settings)
        self._outputs.append(self._client.forward_backward(list(datums), method.loss, settings))

    def submit(
        self, step: int, passes: Sequence[Sequence[Datum]], method: UpdateMethod
    ) -> SubmittedUpdate | None:
        """Submit what is left of a step's passes, and the optimizer step; None without passes.

        Tinker's workers tick every ten seconds, and requests submitted together share a tick.
        """
        if not passes:
            return None
        assert len(self._outputs) <= len(passes), "more passes were submitted than the step has"
        for datums in passes[len(self._outputs) :]:
            self.accumulate(datums, method)
        outputs, self._outputs = self._outputs, []
        return SubmittedUpdate(step, outputs, self._client.optim_step(method.optimizer))

    def result(self, submitted: SubmittedUpdate | None) -> UpdateResult:
        """Wait for an update."""
        if submitted is None:
            return UpdateResult([], None)
        step, wait = submitted.step, self._service.result
        passes = [wait(output, f"forward_backward of step {step}") for output in submitted.outputs]
        metrics = wait(submitted.optimizer, f"optim_step of step {step}").metrics or {}
        taken = metrics.get(STEPS_TAKEN)
        logprobs = [
            datum["logprobs"].to_numpy() for made in passes for datum in made.loss_fn_outputs
        ]
        return UpdateResult(logprobs, None if taken is None else int(taken))

    def probe(self, step: int, datum: Datum, method: UpdateMethod) -> np.ndarray:
        """Return the datum's log-probabilities; nothing changes."""
        forward = self._client.forward([datum], method.loss, dict(method.loss_settings))
        outputs = self._service.result(forward, f"forward of step {step}").loss_fn_outputs
        return outputs[0]["logprobs"].to_numpy()

    def save(self, name: str, ttl_seconds: int | None, *, with_state: bool) -> Saving:
        """Submit saves. Requests are served in order, so the saves hold every update before."""
        sampler = self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
        state = self._client.save_state(name, ttl_seconds=ttl_seconds) if with_state else None
        return sampler, state

    def inflight_sampler(self) -> PatientSampler:
        """Return a sampler of these weights; earlier ones of this client answer by them as well."""
        return self._service.inflight_sampler(self._client)

    def saved(self, step: int, saving: Saving) -> tuple[str, str | None]:
        """Wait for saves; return the paths of the sampler's weights and of the training state."""
        sampler, state = saving
        wait, whose = self._service.result, f"of checkpoint {step}"
        path = wait(sampler, f"the sampler weights {whose}").path
        return path, wait(state, f"the training state {whose}").path if state else None
