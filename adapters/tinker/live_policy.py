"""One live training client, and what a run asks of it: apply datums, look at one, save."""

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

from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint

Saving = tuple[APIFuture[SaveWeightsForSamplerResponse], APIFuture[SaveWeightsResponse] | None]

STEPS_TAKEN = "step:max"
"""The metric in which an engine says how many steps its optimizer has taken."""


@dataclass(frozen=True)
class Lora:
    """The trainable weights, in the words of Tinker's `create_lora_training_client`."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True)
class Method:
    """How datums change weights."""

    loss: LossFnType
    loss_settings: Mapping[str, float]
    adam: AdamParams


@dataclass(frozen=True)
class Applying:
    """An update that is submitted."""

    step: int
    output: APIFuture[ForwardBackwardOutput]
    optimizer: APIFuture[OptimStepResponse]


@dataclass(frozen=True)
class Applied:
    """What an update measured: each datum's log-probabilities before it, and the optimizer's age.

    `optimizer_step` is how many steps the optimizer has taken, this one included; None where the
    service does not say, or there were no datums and so no step.
    """

    logprobs: list[np.ndarray]
    optimizer_step: int | None


class Trainee:
    """A training client. No other process can attach to it, and once a request of it has failed
    nobody knows what its weights are: it is then dropped.
    """

    def __init__(self, service: Service, client: TrainingClient) -> None:
        self._service = service
        self._client = client

    def apply(self, step: int, datums: Sequence[Datum], method: Method) -> Applying | None:
        """Tinker's workers tick every ten seconds: what is submitted together shares a tick."""
        if not datums:
            return None
        settings = dict(method.loss_settings)
        output = self._client.forward_backward(list(datums), method.loss, settings)
        return Applying(step, output, self._client.optim_step(method.adam))

    def applied(self, applying: Applying | None) -> Applied:
        """The update's outcome."""
        if applying is None:
            return Applied([], None)
        step, result = applying.step, self._service.result
        outputs = result(applying.output, f"forward_backward of step {step}").loss_fn_outputs
        metrics = result(applying.optimizer, f"optim_step of step {step}").metrics or {}
        taken = metrics.get(STEPS_TAKEN)
        logprobs = [datum["logprobs"].to_numpy() for datum in outputs]
        return Applied(logprobs, None if taken is None else int(taken))

    def look(self, step: int, datum: Datum, method: Method) -> np.ndarray:
        """The datum's log-probabilities; nothing changes."""
        looking = self._client.forward([datum], method.loss, dict(method.loss_settings))
        outputs = self._service.result(looking, f"forward of step {step}").loss_fn_outputs
        return outputs[0]["logprobs"].to_numpy()

    def save(self, name: str, ttl_seconds: int | None, *, with_state: bool) -> Saving:
        """A client's requests are served in order: what is saved holds every update before it."""
        sampler = self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
        state = self._client.save_state(name, ttl_seconds=ttl_seconds) if with_state else None
        return sampler, state

    def saved(self, step: int, saving: Saving) -> Checkpoint:
        """The checkpoint that was saved."""
        sampler, state = saving
        result, whose = self._service.result, f"of checkpoint {step}"
        return Checkpoint(
            step,
            sampler=result(sampler, f"the sampler weights {whose}").path,
            state=result(state, f"the training state {whose}").path if state else None,
        )
