"""A live training client, and what a run asks of it: apply datums, probe one, save, give out."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tinker import AdamParams, APIFuture, Datum, TensorData, TrainingClient
from tinker.types import (
    ForwardBackwardOutput,
    LossFnType,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

from ratchet.adapters.tinker.costs import Work
from ratchet.adapters.tinker.service import (
    MISREAD,
    Service,
    ServiceFailed,
    ServiceRefused,
    translate_error,
)

Saving = tuple[APIFuture[SaveWeightsForSamplerResponse], APIFuture[SaveWeightsResponse] | None]
"""Submitted saves: the sampler's weights and, if asked for, the training state."""

Derivative = Callable[
    [Sequence[np.ndarray], Sequence[Mapping[str, np.ndarray]]], Sequence[np.ndarray]
]
"""Log-probabilities of each datum's targets, and its inputs → the loss's derivatives by them."""

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
class ServiceLoss:
    """A loss as the service is asked for it.

    With a `derivative`, cross-entropy stands for it, weighted by its negative derivative.
    """

    name: LossFnType
    settings: Mapping[str, float]
    derivative: Derivative | None = None


@dataclass(frozen=True)
class Pass:
    """Datums of a forward-backward pass, and their loss, which is one of the terms of a step's.

    A pass with the `same_tokens` as the pass before it has that one's log-probabilities.
    """

    datums: Sequence[Datum]
    loss: ServiceLoss
    term: int = 0
    same_tokens: bool = False


@dataclass(frozen=True)
class UpdateRequest:
    """Contents of an update: the passes before each of its optimizer steps, and the optimizer."""

    optimizer_steps: Sequence[Sequence[Pass]]
    optimizer: AdamParams

    @property
    def passes(self) -> list[Pass]:
        return [*chain(*self.optimizer_steps)]


@dataclass(frozen=True)
class _Asked:
    """A submitted pass, and the meter's name for it."""

    output: APIFuture[ForwardBackwardOutput]
    metered: str
    datums: Sequence[Datum]


@dataclass(frozen=True)
class SubmittedUpdate:
    """Forward-backward passes and optimizer steps that were submitted."""

    step: int
    outputs: list[_Asked]
    optimizer: list[APIFuture[OptimStepResponse]]


@dataclass(frozen=True)
class UpdateResult:
    """Measurements of an update.

    `logprobs` are those of each pass's datums. `optimizer_step` is how many steps the optimizer has
    taken, the first of this update included; None if none is reported, or without datums.
    """

    logprobs: list[list[np.ndarray]]
    optimizer_step: int | None


class LivePolicy:
    """A training client.

    No other process can attach to it, and once one of its requests has failed its weights are
    unknown, so a client that failed is dropped.
    """

    def __init__(self, service: Service, client: TrainingClient, task: str = "updates") -> None:
        self._service = service
        self._client = client
        self._task = task
        """Folder of the policy's updates, for whose files the meter counts."""
        self._outputs: list[_Asked] = []
        """Passes that no optimizer step has followed."""

    def accumulate(self, step: int, asked: Pass) -> None:
        """Submit a forward-backward pass, whose gradient is added to those of the passes before.

        A loss with a derivative waits for the pass before it, if that has the same tokens, or else
        for a forward pass.
        """
        datums, loss = asked.datums, asked.loss
        if loss.derivative is not None:
            datums = self._weigh(step, asked, loss.derivative)
        metered = self._meter(step, datums)
        submitted = self._client.forward_backward(list(datums), loss.name, dict(loss.settings))
        self._outputs.append(_Asked(submitted, metered, datums))

    def _meter(self, step: int, datums: Sequence[Datum]) -> str:
        trained = sum(datum.model_input.length for datum in datums)
        return self._service.meter.asked(f"{self._task}/{step:05d}", Work(trained=trained))

    def submit(self, step: int, request: UpdateRequest) -> SubmittedUpdate:
        """Submit what is left of a step's passes, and the optimizer's steps.

        Tinker's workers tick every ten seconds, and requests submitted together share a tick.
        """
        begun, taken = len(self._outputs), []
        assert begun <= len(request.passes), "more passes were submitted than the step has"
        for passes in request.optimizer_steps:
            for asked in passes[begun:]:
                self.accumulate(step, asked)
            begun = max(begun - len(passes), 0)
            taken.append(self._client.optim_step(request.optimizer))
        outputs, self._outputs = self._outputs, []
        return SubmittedUpdate(step, outputs, taken)

    def wait_for(
        self, pending: Callable[[], Sequence[Future[Any]]], submitted: SubmittedUpdate
    ) -> None:
        """Wait until nothing is pending any more, or until a submitted update has been made."""
        taken = [step.future() for step in submitted.optimizer[-1:]]
        while taken and not taken[0].done() and (left := pending()):
            self._service.wait_for_any([*taken, *left], f"optim_step of step {submitted.step}")

    def result(self, submitted: SubmittedUpdate) -> UpdateResult:
        step, wait = submitted.step, self._service.result
        logprobs = self._logprobs_of(submitted.outputs, f"step {step}")
        stepped = [wait(taken, f"optim_step of step {step}") for taken in submitted.optimizer]
        taken = (stepped[0].metrics or {}).get(STEPS_TAKEN) if stepped else None
        return UpdateResult(logprobs, None if taken is None else int(taken))

    def _logprobs_of(self, passes: Sequence[_Asked], of: str) -> list[list[np.ndarray]]:
        """Wait for forward-backward passes; return the log-probabilities of the datums of each."""
        return [self._wait(asked, f"forward_backward of {of}") for asked in passes]

    def _wait(self, asked: _Asked, what: str) -> list[np.ndarray]:
        outputs = self._service.result(asked.output, what).loss_fn_outputs
        self._service.meter.answered(asked.metered)
        try:
            found = [output["logprobs"].to_numpy() for output in outputs]
            for one, datum in zip(found, asked.datums, strict=True):
                one.reshape(datum.loss_fn_inputs["target_tokens"].to_numpy().shape)
        except MISREAD as error:
            raise translate_error(error, what) from error
        return found

    def probe(self, step: int, datum: Datum, loss: ServiceLoss) -> np.ndarray:
        """Return the datum's log-probabilities; nothing changes."""
        return self._forward(step, [datum], loss, f"forward of step {step}")[0]

    def _weigh(self, step: int, asked: Pass, derivative: Derivative) -> list[Datum]:
        datums = asked.datums
        if asked.same_tokens:
            (logprobs,) = self._logprobs_of(self._outputs[-1:], "the pass of the same tokens")
        else:
            logprobs = self._forward(
                step, datums, asked.loss, "the forward pass of a loss by weights"
            )
        inputs = [
            {name: given.to_numpy() for name, given in datum.loss_fn_inputs.items()}
            for datum in datums
        ]
        weighted = []
        slopes = derivative(logprobs, inputs)
        for datum, slope, given in zip(datums, slopes, inputs, strict=True):
            weights = (-slope * given["weights"]).astype(np.float32)
            weighted.append(_weighted(datum, TensorData.from_numpy(weights)))
        return weighted

    def _forward(
        self, step: int, datums: Sequence[Datum], loss: ServiceLoss, what: str
    ) -> list[np.ndarray]:
        if loss.derivative is not None:
            datums = [_weighted(datum, datum.loss_fn_inputs["weights"]) for datum in datums]
        metered = self._meter(step, datums)
        forward = self._client.forward(list(datums), loss.name, dict(loss.settings))
        return self._wait(_Asked(forward, metered, datums), what)

    def save(self, name: str, ttl_seconds: int | None, *, with_state: bool) -> Saving:
        """Submit saves. Requests are served in order, so the saves hold every update before.

        The SDK numbers the save of a sampler in its own thread, and an update at once. Without a
        wait for that thread, an update that is submitted next could be served before the save.
        """
        sampler = self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
        numbered = self._client.holder.run_coroutine_threadsafe(asyncio.sleep(0))
        self._service.result(numbered, f"the number of the save {name}")
        state = self._client.save_state(name, ttl_seconds=ttl_seconds) if with_state else None
        return sampler, state

    def save_external(self, name: str, ttl_seconds: int) -> str:
        """Have the service keep these weights for download; return their path."""
        saving = self._client.save_weights_external(name, ttl_seconds=ttl_seconds)
        return self._service.result(saving, "weights for other programs").path

    def saved(self, step: int, saving: Saving) -> tuple[str, str | None]:
        """Wait for saves; return the paths of the sampler's weights and of the training state."""
        sampler, state = saving
        wait, whose = self._service.result, f"of checkpoint {step}"
        path = wait(sampler, f"the sampler weights {whose}").path
        return path, wait(state, f"the training state {whose}").path if state else None


def _weighted(datum: Datum, weights: TensorData) -> Datum:
    targets = datum.loss_fn_inputs["target_tokens"]
    inputs = {"target_tokens": targets, "weights": weights}
    return Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference of log-probabilities; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours.astype(np.float64) - theirs).max())


FILES = {"adapter_config.json", "adapter_model.safetensors"}
KEPT_SECONDS = 3600
"""Time for which the service keeps what it gives out, if it is not told to delete it."""
LARGEST_BYTES = 2**36


def fetch_weights(service: Service, live: LivePolicy, folder: Path) -> None:
    """Download the adapter of a training client into a folder; the service keeps nothing of it."""
    path = live.save_external("export", KEPT_SECONDS)
    try:
        asked = service.rest().get_external_weights_urls(path)
        urls = service.result(asked, "the addresses of the exported weights").urls
        if lacking := sorted(FILES - urls.keys()):
            raise ServiceRefused(
                f"the Tinker service gives out {', '.join(sorted(urls))}, without {lacking[0]}; "
                "export the checkpoint by the service's own program"
            )
        for name in sorted(FILES):
            service.call(f"the file {name}", download, urls[name], folder / name)
    finally:
        service.delete(path)


def download(url: str, file: Path) -> None:
    """Write what a URL leads to; no error shows the URL, which opens the file to anybody."""
    size = 0
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as answer:
            answer.raise_for_status()
            with file.open("wb") as out:
                for part in answer.iter_bytes():
                    size += out.write(part)
                    if size > LARGEST_BYTES:
                        raise ServiceRefused(f"{file.name} is larger than {LARGEST_BYTES} bytes")
    except httpx.HTTPError as error:
        said = type(error).__name__  # whose text has the URL
        raise ServiceFailed(f"{file.name} cannot be downloaded ({said}); export again") from error
