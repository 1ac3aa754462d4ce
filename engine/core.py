"""The engine behind its routes: one base model, its device, and everything that lives on them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import TypeVar

from engine.base_models import BaseModel
from engine.checkpoints import SAMPLER, TRAINING, Address, Checkpoint, Checkpoints, Clock, utc_now
from engine.errors import NotFound, UserError
from engine.futures import Futures
from engine.lora import Lora
from engine.model import LanguageModel
from engine.registry import Registry, Run, Sampler
from engine.resident import ResidentWeights
from engine.scheduler import Scheduler
from engine.training import Trainer
from engine.weights import load_lora, load_optimizer, save_lora, save_optimizer

T = TypeVar("T")

ABANDONED = timedelta(hours=2)


@dataclass
class Trainee:
    """A live training client's model. `last_seq` is the number of its newest request."""

    run: Run
    trainer: Trainer
    used: datetime
    last_seq: int = 0


class Engine:
    """Lives on one event loop; `on_device` is the way to the device's thread."""

    def __init__(
        self,
        base: BaseModel,
        model: LanguageModel,
        state: Path,
        threads: int = 1,
        now: Clock = utc_now,
    ) -> None:
        self.base = base
        self.model = model
        self.registry = Registry(state, now)
        self.checkpoints = Checkpoints(state, now)
        self.scheduler = Scheduler(model, threads)
        self.resident = ResidentWeights()
        self.futures = Futures()
        self.trainees: dict[str, Trainee] = {}
        self.copies: dict[str, str] = {}
        """Idempotency key of a copy_weights → the path it made: such a request has no number."""

    async def on_device(self, function: Callable[[], T]) -> T:
        """Run on the device's thread, after what was handed to it before."""
        return await awaited(self.scheduler.run(function))

    def check_base_model(self, name: str) -> None:
        if not self.base.is_called(name):
            raise UserError(
                f"this engine serves {self.base.name}, not {name!r}; ask for that one, or start "
                f"an engine with --base-model {name}"
            )

    def trainee(self, model_id: str) -> Trainee:
        found = self.trainees.get(model_id)
        if found is None:
            raise NotFound(self._why_not_live(model_id))
        found.used = self.registry.now()
        return found

    def enlist(self, run: Run, trainer: Trainer) -> None:
        """A new training client lives; those of clients that died make room."""
        self.trainees[run.run_id] = Trainee(run, trainer, self.registry.now())
        for session_id in {trainee.run.session_id for trainee in self.trainees.values()}:
            if self._abandoned(session_id):
                self.release(session_id)

    def _abandoned(self, session_id: str) -> bool:
        """Neither a sign of life nor a request for long: the client's process is no more."""
        trainees = self.trainees.values()
        used = [one.used for one in trainees if one.run.session_id == session_id]
        last = max(*used, self.registry.last_heard(session_id))
        return self.registry.now() - last > ABANDONED

    def _why_not_live(self, model_id: str) -> str:
        if model_id not in self.registry.runs:
            return f"there is no training client {model_id!r}; create one"
        fact = (
            f"the training client {model_id} lives no more: the engine restarted, or its session "
            "was closed or fell silent for hours; what it had not saved is lost"
        )
        saved = [record for record in self.checkpoints.listed(model_id) if record.kind == TRAINING]
        if not saved:
            return f"{fact}. Nothing was saved; create a new training client"
        return (
            f"{fact}. Continue from its last checkpoint: "
            f"create_training_client_from_state_with_optimizer({str(saved[0].address)!r})"
        )

    def loadable(self, path: str, kinds: tuple[str, ...] = (TRAINING, SAMPLER)) -> Address:
        """The address of a checkpoint that fits this engine; raises UserError for any other."""
        address = Address.parse(path)
        checkpoint = self.checkpoints.find(address)
        self.check_base_model(checkpoint.base_model)
        if address.kind not in kinds:
            raise UserError(
                f"{address} holds weights for sampling only; load training state, saved with "
                f"save_state, at {address.run}/{TRAINING}/<name>"
            )
        return address

    def loaded_trainer(self, address: Address, optimizer: bool) -> Trainer:
        """On the device's thread: a trainer that continues from a checkpoint."""
        trainer = Trainer(self.model, self._loaded_lora(address))
        if optimizer:
            trainer.load_optimizer(load_optimizer(self.checkpoints.folder(address)))
        return trainer

    def save(self, trainee: Trainee, address: Address, options: "SaveOptions") -> Checkpoint:
        """On the device's thread: the weights as they are now, with Adam's state for training."""
        trainer = trainee.trainer

        def write(folder: Path) -> None:
            save_lora(trainer.lora, folder)
            if address.kind == TRAINING:
                save_optimizer(trainer.optimizer_tensors(), folder)

        checkpoint = self.checkpoints.save(
            address,
            write,
            base_model=self.base.name,
            lora=trainer.lora.config,
            ttl_seconds=options.ttl_seconds,
            overwrite=options.overwrite,
            user_metadata=options.user_metadata,
        )
        self.registry.touch(trainee.run.run_id)
        return checkpoint

    async def weights_of(self, sampler: Sampler) -> Lora | None:
        """What a sampler's requests are answered with; None is the base model."""
        key = sampler.weights_key
        if key is None:
            return None
        resident = self.resident.get(key)
        if resident is not None:
            return resident
        if sampler.path is None:
            raise NotFound(
                f"the weights of {sampler.sampler_id} were a snapshot of a training client and are "
                "no longer in memory; make a new sampling client, or save them by name with "
                "save_weights_for_sampler"
            )
        path = sampler.path
        return await self.on_device(lambda: self._resident_from(path))

    def _resident_from(self, path: str) -> Lora:
        """On the device's thread, so that two first requests load the weights once."""
        resident = self.resident.get(path)
        if resident is None:
            resident = self._loaded_lora(self.loadable(path))
            self.resident.put(path, resident)
        return resident

    def _loaded_lora(self, address: Address) -> Lora:
        checkpoint = self.checkpoints.find(address)
        return load_lora(self.model, checkpoint.lora, self.checkpoints.folder(address))

    def keep_snapshot(self, sampler: Sampler, frozen: Lora) -> None:
        """Answer the sampler's requests with weights that are in memory only."""
        key = sampler.weights_key
        assert key is not None
        self.resident.put(key, frozen)
        self.registry.add_sampler(sampler)

    def release(self, session_id: str) -> None:
        """Free the memory of a closed session's training clients and snapshots."""
        for run_id, trainee in list(self.trainees.items()):
            if trainee.run.session_id == session_id:
                del self.trainees[run_id]
                self.resident.remove(run_id)
        for sampler in self.registry.samplers.values():
            if sampler.session_id == session_id and sampler.weights == "snapshot":
                self.resident.remove(sampler.sampler_id)

    def close(self, seconds: float) -> None:
        """Stop the device's thread, unless what it computes takes longer than that."""
        closing = Thread(target=self.scheduler.close, daemon=True)
        closing.start()
        closing.join(seconds)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What may be said of a checkpoint besides its name."""

    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


async def awaited(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
