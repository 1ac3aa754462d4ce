"""checkpoint × datums → checkpoint: forward-backward and optimizer step, submitted back to back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tinker import AdamParams, APIFuture, Datum, TrainingClient
from tinker.types import (
    ForwardBackwardOutput,
    LossFnType,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

from adapters.tinker import Service
from tasks.checkpoints import Checkpoint, Ledger
from tasks.datums import read_datums

Applied = tuple[APIFuture[ForwardBackwardOutput], APIFuture[OptimStepResponse]]
Saving = tuple[APIFuture[SaveWeightsForSamplerResponse], APIFuture[SaveWeightsResponse] | None]


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


@dataclass
class Learner:
    """The one owner of the training client, which no other process can attach to.

    It knows the step that its live weights stand at. The weights of any other step are rebuilt:
    the last state saved before it, and the recorded datums since, each applied once.
    """

    service: Service
    ledger: Ledger
    datums: Callable[[int], Path]
    """The recorded datums of a step."""
    lora: Lora
    method: Method
    ttl_seconds: int | None
    _client: TrainingClient | None = field(default=None, init=False)
    _step: int = field(default=-1, init=False)

    def initial(self) -> Checkpoint:
        """Checkpoint 0: the untrained LoRA, made and saved if the ledger has none."""
        if self.ledger.last() is not None:
            return self.ledger.at(0)
        client = self.service.result(
            self.service.client.create_lora_training_client(**vars(self.lora))
        )
        return self._recorded(client, 0, self._save(client, 0, with_state=True))

    def update(self, checkpoint: Checkpoint, datums: Path, *, with_state: bool) -> list[np.ndarray]:
        """Make the next checkpoint; returns each datum's log-probabilities before the update.

        A batch without datums moves nothing: the next checkpoint has the same weights. An update
        that fails leaves no live client behind, since whether it was applied is then unknown.
        """
        batch = read_datums(datums, self.method.loss)
        client = self._at(checkpoint.step)
        self._client = None
        applied = self._apply(client, batch)
        saving = self._save(client, checkpoint.step + 1, with_state=with_state)
        logprobs = self._logprobs(applied)
        self._recorded(client, checkpoint.step + 1, saving)
        return logprobs

    def _at(self, step: int) -> TrainingClient:
        if self._client is not None and self._step == step:
            return self._client
        saved = self.ledger.saved(step)
        assert saved.state is not None
        client = self.service.result(
            self.service.client.create_training_client_from_state_with_optimizer(saved.state)
        )
        for passed in range(saved.step, step):
            batch = read_datums(self.datums(passed), self.method.loss)
            self._logprobs(self._apply(client, batch))
        return client

    def _apply(self, client: TrainingClient, batch: Sequence[Datum]) -> Applied | None:
        """Tinker's workers tick every ten seconds: what is submitted together shares a tick."""
        if not batch:
            return None
        settings = dict(self.method.loss_settings)
        output = client.forward_backward(list(batch), self.method.loss, settings)
        return output, client.optim_step(self.method.adam)

    def _save(self, client: TrainingClient, step: int, *, with_state: bool) -> Saving:
        """A client's requests are served in order: what is saved holds every update before it."""
        name = f"{step:05d}"
        sampler = client.save_weights_for_sampler(name, ttl_seconds=self.ttl_seconds)
        state = client.save_state(name, ttl_seconds=self.ttl_seconds) if with_state else None
        return sampler, state

    def _logprobs(self, applied: Applied | None) -> list[np.ndarray]:
        if applied is None:
            return []
        output, optimizer = applied
        outputs = self.service.result(output).loss_fn_outputs
        self.service.result(optimizer)
        return [datum["logprobs"].to_numpy() for datum in outputs]

    def _recorded(self, client: TrainingClient, step: int, saving: Saving) -> Checkpoint:
        sampler, state = saving
        checkpoint = Checkpoint(
            step,
            sampler=self.service.result(sampler).path,
            state=self.service.result(state).path if state else None,
        )
        self.ledger.add(checkpoint)
        self._client, self._step = client, step
        return checkpoint
