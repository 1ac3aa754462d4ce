"""Saved weights: tinker://<run>/<kind>/<name> ⇄ folders of the state directory."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import RLock
from typing import Literal
from uuid import uuid4

import tinker.types
from pydantic import BaseModel

from engine.disk import Records, whole
from engine.errors import NotFound, UserError
from engine.lora import LoraConfig

SCHEME = "tinker://"
TRAINING, SAMPLER = "weights", "sampler_weights"
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
LONGEST_TTL = 10 * 365 * 24 * 3600

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a checkpoint is. Its parts are checked: they name folders of ours."""

    run: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not RUN.fullmatch(self.run):
            raise UserError(f"{self.run!r} is not the id of a training run")
        if self.kind not in (TRAINING, SAMPLER):
            raise UserError(f"{self.kind!r} is not a kind of checkpoint: {TRAINING} or {SAMPLER}")
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} cannot name a checkpoint: use up to 200 letters, digits and '._-', "
                "not beginning with a dot"
            )

    @classmethod
    def parse(cls, path: str) -> "Address":
        run, *rest = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(rest) != 2:
            raise UserError(f"{path!r} is not a checkpoint's path, {SCHEME}<run>/{TRAINING}/<name>")
        return cls(run, *rest)

    def __str__(self) -> str:
        return f"{SCHEME}{self.key}"

    @property
    def key(self) -> str:
        return f"{self.run}/{self.kind}/{self.name}"


class Checkpoint(BaseModel):
    """What is known of saved weights. `folder` is the name of the one that holds the tensors."""

    run: str
    kind: Literal["weights", "sampler_weights"]
    name: str
    folder: str
    base_model: str
    lora: LoraConfig
    created_at: datetime
    size_bytes: int
    public: bool = False
    expires_at: datetime | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def address(self) -> Address:
        return Address(self.run, self.kind, self.name)

    def listed(self) -> tinker.types.Checkpoint:
        return tinker.types.Checkpoint(
            checkpoint_id=f"{self.kind}/{self.name}",
            checkpoint_type="training" if self.kind == TRAINING else "sampler",
            time=self.created_at,
            tinker_path=str(self.address),
            size_bytes=self.size_bytes,
            public=self.public,
            user_metadata=self.user_metadata,
            expires_at=self.expires_at,
        )


class Checkpoints:
    """The checkpoints of a state directory; safe to use from the device's thread and the loop's.

    The record is the checkpoint: it is written after its tensors are, and replaced atomically. An
    expired one leaves its record behind, without tensors, to say why it cannot be loaded.
    """

    def __init__(self, state: Path, now: Clock = utc_now) -> None:
        self._records = Records(state / "checkpoints", Checkpoint)
        self._folder = state / "tensors"
        self._now = now
        self._lock = RLock()
        self._sweep()
        self._discard_unfinished()

    def save(
        self,
        address: Address,
        write: Callable[[Path], None],
        *,
        base_model: str,
        lora: LoraConfig,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Let `write` fill a folder and record it."""
        expires_at = self.expiry(ttl_seconds)
        replaced = self._records.get(address.key)
        if replaced and not self._expired(replaced) and not overwrite:
            raise UserError(
                f"{address} exists; save under another name, delete it, or (training state only) "
                "pass overwrite=True"
            )
        folder = self._folder / address.run / address.kind / f"{address.name}.{uuid4().hex[:8]}"
        with whole(folder) as aside:
            write(aside)
        record = Checkpoint(
            run=address.run,
            kind=address.kind,  # type: ignore[arg-type]
            name=address.name,
            folder=folder.name,
            base_model=base_model,
            lora=lora,
            created_at=self._now(),
            size_bytes=sum(path.stat().st_size for path in folder.iterdir()),
            expires_at=expires_at,
            user_metadata=user_metadata,
        )
        with self._lock:
            self._records.put(address.key, record)
            if replaced:
                shutil.rmtree(self._tensors(replaced), ignore_errors=True)
        return record

    def find(self, address: Address) -> Checkpoint:
        """The record of a checkpoint that can be loaded."""
        record = self._records.get(address.key)
        if record is None:
            raise NotFound(f"there is no checkpoint {address}; it was never saved, or was deleted")
        if self._expired(record):
            raise NotFound(
                f"the checkpoint {address} expired at {record.expires_at:%Y-%m-%d %H:%M:%S} UTC; "
                "save with a longer ttl_seconds, or without one"
            )
        return record

    def folder(self, address: Address) -> Path:
        return self._tensors(self.find(address))

    def listed(self, run: str | None = None) -> list[Checkpoint]:
        """Those that can be loaded, newest first; all, or of one run."""
        self._sweep()
        records = [record for record in self._records.values() if run in (None, record.run)]
        alive = [record for record in records if not self._expired(record)]
        return sorted(alive, key=lambda record: record.created_at, reverse=True)

    def publish(self, address: Address, public: bool) -> None:
        self._change(address, public=public)

    def expire_in(self, address: Address, ttl_seconds: int | None) -> None:
        self._change(address, expires_at=self.expiry(ttl_seconds))

    def delete(self, address: Address) -> None:
        with self._lock:
            record = self.find(address)
            self._records.remove(address.key)
            shutil.rmtree(self._tensors(record), ignore_errors=True)

    def copy(self, source: Address, run: str, ttl_seconds: int | None) -> Checkpoint:
        """The same weights as a checkpoint of another run; the files are shared where they can."""
        record, files = self.find(source), self.folder(source)
        return self.save(
            Address(run, source.kind, source.name),
            lambda folder: _link_all(files, folder),
            base_model=record.base_model,
            lora=record.lora,
            ttl_seconds=ttl_seconds,
            user_metadata=record.user_metadata,
        )

    def expiry(self, ttl_seconds: int | None) -> datetime | None:
        if ttl_seconds is None:
            return None
        if not 0 < ttl_seconds <= LONGEST_TTL:
            raise UserError(f"ttl_seconds={ttl_seconds}; it is at least 1 and at most ten years")
        return self._now() + timedelta(seconds=ttl_seconds)

    def _change(self, address: Address, **changes: object) -> None:
        with self._lock:
            record = self.find(address)
            self._records.put(address.key, record.model_copy(update=changes))

    def _expired(self, record: Checkpoint) -> bool:
        return record.expires_at is not None and record.expires_at <= self._now()

    def _tensors(self, record: Checkpoint) -> Path:
        return self._folder / record.run / record.kind / record.folder

    def _sweep(self) -> None:
        """Free the disk of expired checkpoints."""
        with self._lock:
            for record in self._records.values():
                if self._expired(record):
                    shutil.rmtree(self._tensors(record), ignore_errors=True)

    def _discard_unfinished(self) -> None:
        """Remove what an engine that was killed while saving or replacing left behind."""
        recorded = {self._tensors(record) for record in self._records.values()}
        for folder in self._folder.glob("*/*/*/"):
            if folder not in recorded:
                shutil.rmtree(folder)


def _link_all(source: Path, target: Path) -> None:
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:  # another file system, or one without links
            shutil.copy2(path, target / path.name)
