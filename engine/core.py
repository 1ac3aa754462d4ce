"""The engine behind the HTTP routes: one base model, its device, and all state on them."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Annotated

from fastapi import Depends, Request
from safetensors.torch import load_file

from ratchet.engine.errors import NotFound, RequestRefused
from ratchet.engine.futures import Futures
from ratchet.engine.model.base_models import BaseModel
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.sampling.scheduler import ResidentWeights, Scheduler
from ratchet.engine.state.checkpoints import (
    EXTERNAL,
    OPTIMIZER,
    SAMPLER,
    TRAINING,
    CheckpointAddress,
    CheckpointRecord,
    CheckpointStore,
    Clock,
    SaveOptions,
    load_lora,
    save_external,
    save_lora,
    save_tensors,
    utc_now,
)
from ratchet.engine.state.registry import Registry, RunRecord, SamplerRecord, to_text_values
from ratchet.engine.training.trainer import Trainer

ABANDONED = timedelta(hours=2)
"""Time without a heartbeat or a request after which a session's models are released."""


@dataclass
class LiveModel:
    """The model of a live training client; `last_seq` is the number of its newest request."""

    run: RunRecord
    trainer: Trainer
    used: datetime
    last_seq: int = 0


class EngineCore:
    """Model, registry, checkpoints, scheduler and futures, used from one event loop."""

    def __init__(
        self, base: BaseModel, model: LanguageModel, state: Path, now: Clock = utc_now
    ) -> None:
        self.base = base
        self.model = model
        self.registry = Registry(state, now)
        self.checkpoints = CheckpointStore(state, now)
        self.scheduler = Scheduler(model)
        self.futures = Futures()
        self.resident = ResidentWeights()
        self.live_models: dict[str, LiveModel] = {}

    def check_base_model(self, name: str) -> None:
        if not self.base.has_name(name):
            raise RequestRefused(
                f"this engine serves {self.base.name}, not {name!r}; ask for {self.base.name}, or "
                f"start an engine with --base-model {name}"
            )

    def live_model(self, model_id: str) -> LiveModel:
        found = self.live_models.get(model_id)
        if found is None:
            raise NotFound(self._explain_missing(model_id))
        found.used = self.registry.now()
        return found

    def begin_run(self, run_id: str, session_id: str, trainer: Trainer, metadata: object) -> None:
        """Record a run and its live model, and release the models of clients that died."""
        lora = trainer.lora.config
        now, told = self.registry.now(), to_text_values(metadata)
        run = RunRecord(
            run_id=run_id,
            session_id=session_id,
            base_model=self.base.name,
            lora=lora,
            created_at=now,
            last_request_time=now,
            user_metadata=told,
        )
        self.registry.runs.put(run_id, run)
        self.live_models[run_id] = LiveModel(run, trainer, now)
        live_models = [*self.live_models.values()]
        for session_id in {one.run.session_id for one in live_models}:
            used = [one.used for one in live_models if one.run.session_id == session_id]
            last = max(*used, self.registry.last_heartbeat(session_id))
            if self.registry.now() - last > ABANDONED:
                self.release(session_id)

    def _explain_missing(self, model_id: str) -> str:
        if model_id not in self.registry.runs:
            return f"there is no training client {model_id!r}; create a training client"
        fact = (
            f"the training client {model_id} is gone: the engine restarted, or the session was "
            "closed or sent no heartbeat for hours; unsaved weights are lost"
        )
        saved = [one for one in self.checkpoints.find_all(model_id) if one.kind == TRAINING]
        if not saved:
            return f"{fact}. Nothing was saved; create a new training client"
        return (
            f"{fact}. Continue from its last checkpoint: "
            f"create_training_client_from_state_with_optimizer({str(saved[0].address)!r})"
        )

    def check_loadable(
        self, path: str, kinds: tuple[str, ...] = (TRAINING, SAMPLER)
    ) -> CheckpointAddress:
        """Return a checkpoint's address; raise RequestRefused if this engine cannot load it."""
        address = CheckpointAddress.parse(path)
        checkpoint = self.checkpoints.find(address)
        self.check_base_model(checkpoint.base_model)
        if address.kind not in kinds:
            raise RequestRefused(
                f"{address} holds {address.kind}, which cannot be loaded here; load training "
                f"state, saved with save_state, at {address.run}/{TRAINING}/<name>"
            )
        return address

    def load_trainer(self, address: CheckpointAddress, optimizer: bool) -> Trainer:
        """Create a trainer that continues from a checkpoint; runs on the device thread."""
        lora, folder = self.checkpoints.find(address).lora, self.checkpoints.folder(address)
        trainer = Trainer(self.model, load_lora(self.model, lora, folder))
        if optimizer:
            trainer.load_optimizer(load_file(folder / OPTIMIZER))
        return trainer

    def save(
        self, live_model: LiveModel, address: CheckpointAddress, options: SaveOptions
    ) -> CheckpointRecord:
        """Save the current weights, for training with Adam's state; runs on the device thread.

        External weights have the names of Tinker's exports, and are for other programs.
        """
        trainer = live_model.trainer

        def write(folder: Path) -> None:
            if address.kind == EXTERNAL:
                save_external(trainer.lora, self.model, folder)
            else:
                save_lora(trainer.lora, folder)
            if address.kind == TRAINING:
                save_tensors(trainer.optimizer_tensors(), folder / OPTIMIZER)

        checkpoint = self.checkpoints.save(
            address, write, self.base.name, trainer.lora.config, options
        )
        self.registry.touch(live_model.run.run_id)
        return checkpoint

    async def weights_of(self, sampler: SamplerRecord) -> LoraWeights | None:
        """Return the weights that answer a sampler's requests; None is the base model."""
        if sampler.weights_key is None:
            return None
        if resident := self.resident.get(sampler.weights_key):
            return resident
        if sampler.path is None:
            raise NotFound(
                f"the weights of {sampler.sampler_id} were a snapshot of a training client and are "
                "no longer in memory; make a new sampling client, or save the weights by name with "
                "save_weights_for_sampler"
            )
        load = partial(self._load_resident, sampler.path)
        return await asyncio.wrap_future(self.scheduler.run(load))

    def _load_resident(self, path: str) -> LoraWeights:
        """Load weights on the device thread, so that two first requests load them once."""
        resident = self.resident.get(path)
        if resident is None:
            address = self.check_loadable(path)
            lora, folder = self.checkpoints.find(address).lora, self.checkpoints.folder(address)
            resident = load_lora(self.model, lora, folder)
            self.resident.put(path, resident)
        return resident

    def release(self, session_id: str) -> None:
        """Free the memory of a closed session's training clients and snapshots."""
        for run_id, live_model in list(self.live_models.items()):
            if live_model.run.session_id == session_id:
                del self.live_models[run_id]
                self.resident.remove(run_id)
        for sampler in self.registry.samplers.values():
            if sampler.session_id == session_id and sampler.weights == "snapshot":
                self.resident.remove(sampler.sampler_id)

    def close(self, seconds: float) -> bool:
        """Stop the device thread; wait at most `seconds`, and return whether it has ended."""
        closing = Thread(target=self.scheduler.close, daemon=True)
        closing.start()
        closing.join(seconds)
        return not closing.is_alive()


async def _engine(request: Request) -> EngineCore:
    return request.app.state.engine


TheEngine = Annotated[EngineCore, Depends(_engine)]
"""Parameter of a route."""
Submitted = dict[str, object]
"""Answer of a route whose work has begun: the id of its future, and the ids of what it makes."""
