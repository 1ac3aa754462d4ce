"""Checkpoints: saved weights by tinker:// path, in folders of the state directory.

Weights are a PEFT adapter in safetensors, so PEFT, vLLM and others load the folder as it is.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import RLock
from typing import ClassVar, Literal
from uuid import uuid4

import tinker.types
import torch
from safetensors.torch import load_file, save

from ratchet.durable.files import appearing_folder, link_or_copy, remove, sha256_of, write_file
from ratchet.engine.disk import Records, StoredRecord
from ratchet.engine.errors import NotFound, RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import ALPHA, LoraConfig, LoraWeights

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
UNEMBEDDING = "model.unembed_tokens"
"""Name of the output layer in Tinker's exports."""

_PREFIX = "base_model.model."
_SUFFIX = ".weight"


def save_lora(lora: LoraWeights, folder: Path, renamed: Mapping[str, str] | None = None) -> None:
    """Write the weights; layers that are `renamed` have another name in the files."""
    names = {layer: (renamed or {}).get(layer, layer) for layer in lora.pairs}
    tensors = {
        f"{_PREFIX}{names[layer]}.{matrix}{_SUFFIX}": tensor
        for layer, pair in lora.pairs.items()
        for matrix, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.config.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names.values()),
        "inference_mode": True,
    }
    write_file(folder / CONFIG, json.dumps(config, indent=2).encode())
    save_tensors(tensors, folder / WEIGHTS)


def save_external(lora: LoraWeights, model: LanguageModel, folder: Path) -> None:
    """Write the weights under the names that Tinker's exports have."""
    heads = (name for name, layer in model.linears.items() if layer.kind == "unembedding")
    save_lora(lora, folder, dict.fromkeys(heads, UNEMBEDDING))


def load_lora(model: LanguageModel, config: LoraConfig, folder: Path) -> LoraWeights:
    """Read weights; raise RequestRefused if they do not fit this model and config."""
    tensors = {
        name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    return LoraWeights.from_tensors(model, config, tensors)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    portable = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, save(portable))


SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
TYPES: dict[str, tinker.types.CheckpointType] = {
    TRAINING: "training",
    SAMPLER: "sampler",
    EXTERNAL: "external",
}
"""Kind of a checkpoint → the same in the words of the API's answers."""
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
LONGEST_TTL = 10 * 365 * 24 * 3600

Clock = Callable[[], datetime]

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class CheckpointAddress:
    """A checkpoint's path, tinker://<run>/<kind>/<name>, validated because it names folders."""

    run: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not RUN.fullmatch(self.run):
            raise RequestRefused(
                f"{self.run!r} is not the id of a training run; copy the id from the path that a "
                "save returned"
            )
        if self.kind not in TYPES:
            raise RequestRefused(
                f"{self.kind!r} is not a kind of checkpoint; there are: {', '.join(TYPES)}"
            )
        if not NAME.fullmatch(self.name):
            raise RequestRefused(
                f"{self.name!r} cannot name a checkpoint: use up to 200 letters, digits and '._-', "
                "not beginning with a dot"
            )

    @classmethod
    def parse(cls, path: str) -> "CheckpointAddress":
        run, *rest = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(rest) != 2:
            raise RequestRefused(
                f"{path!r} is not a checkpoint's path; give {SCHEME}<run>/{TRAINING}/<name>"
            )
        return cls(run, *rest)

    def __str__(self) -> str:
        return f"{SCHEME}{self.key}"

    @property
    def key(self) -> str:
        return f"{self.run}/{self.kind}/{self.name}"


class CheckpointRecord(StoredRecord):
    """Metadata of saved weights.

    `folder` is the name of the folder that holds the files, and `sha256` has each file's digest.
    """

    missing: ClassVar[str] = (
        "there is no checkpoint tinker://{}; it was never saved, or was deleted"
    )
    run: str
    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str
    folder: str
    sha256: dict[str, str]
    base_model: str
    lora: LoraConfig
    created_at: datetime
    size_bytes: int
    public: bool = False
    expires_at: datetime | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def address(self) -> CheckpointAddress:
        return CheckpointAddress(self.run, self.kind, self.name)

    @property
    def digests(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.sha256.items())

    def damaged(self, folder: Path) -> list[Path]:
        """List the files in the checkpoint's folder that are not as they were written."""
        paths = {folder / name: digest for name, digest in self.sha256.items()}
        return [path for path, digest in paths.items() if sha256_of(path) != digest]

    def to_api(self) -> tinker.types.Checkpoint:
        return tinker.types.Checkpoint(
            checkpoint_id=f"{self.kind}/{self.name}",
            checkpoint_type=TYPES[self.kind],
            time=self.created_at,
            tinker_path=str(self.address),
            size_bytes=self.size_bytes,
            public=self.public,
            user_metadata=self.user_metadata,
            expires_at=self.expires_at,
        )


@dataclass(frozen=True, slots=True)
class SaveOptions:
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class CheckpointStore:
    """The checkpoints of a state directory, safe to use from the device thread and the event loop.

    A checkpoint exists if its record does: the record is written after the tensors and replaced
    atomically. An expired checkpoint keeps its record, without tensors, for the error message.
    """

    def __init__(self, state: Path, now: Clock = utc_now) -> None:
        self._records = Records(state / "checkpoints", CheckpointRecord)
        self._folder = state / "tensors"
        self._now = now
        self._lock = RLock()
        self._with_bytes: dict[frozenset[tuple[str, str]], set[str]] = {}
        """Digests of the files of checkpoints → the keys of those that have these files."""
        for record in self._records.values():
            self._note(record)
        self._delete_expired()
        self._delete_unfinished()

    def save(
        self,
        address: CheckpointAddress,
        write: Callable[[Path], None],
        base_model: str,
        lora: LoraConfig,
        options: SaveOptions,
    ) -> CheckpointRecord:
        """Let `write` fill a folder with tensors, and record the folder as a checkpoint."""
        expires_at = self.expiry(options.ttl_seconds)
        replaced = self._records.get(address.key)
        if replaced and not self._is_expired(replaced) and not options.overwrite:
            raise RequestRefused(
                f"{address} exists; use another name, delete the checkpoint, or (for training "
                "state only) pass overwrite=True"
            )
        folder = self._folder / address.run / address.kind / f"{address.name}.{uuid4().hex[:8]}"
        with appearing_folder(folder) as aside:
            write(aside)
        record = CheckpointRecord(
            run=address.run,
            kind=address.kind,  # type: ignore[arg-type]
            name=address.name,
            folder=folder.name,
            sha256={path.name: str(sha256_of(path)) for path in folder.iterdir()},
            base_model=base_model,
            lora=lora,
            created_at=self._now(),
            size_bytes=sum(path.stat().st_size for path in folder.iterdir()),
            expires_at=expires_at,
            user_metadata=options.user_metadata,
        )
        with self._lock:
            self._records.put(address.key, record)
            if replaced:
                self._drop(replaced)
            self._note(record)
            self._mend_by(record)
        return record

    def _note(self, record: CheckpointRecord) -> None:
        self._with_bytes.setdefault(record.digests, set()).add(record.address.key)

    def _drop(self, record: CheckpointRecord) -> None:
        """Remove the tensors of a record that is replaced or removed."""
        same = self._with_bytes[record.digests]
        same.discard(record.address.key)
        if not same:
            del self._with_bytes[record.digests]
        shutil.rmtree(self._tensors(record), ignore_errors=True)

    def _mend_by(self, saved: CheckpointRecord) -> None:
        """Replace damaged checkpoints by `saved`, if it has the bytes that they should have."""
        for key in sorted(self._with_bytes[saved.digests]):
            other = self._records.find(key)
            folder = self._tensors(other)
            if not self._is_expired(other) and other.damaged(folder):
                log.warning("%s was damaged, and is mended by %s", other.address, saved.address)
                remove(folder)
                with appearing_folder(folder) as aside:
                    for path in self._tensors(saved).iterdir():
                        link_or_copy(path, aside / path.name)

    def find(self, address: CheckpointAddress) -> CheckpointRecord:
        """Return the record of a checkpoint; raise NotFound if it is missing or expired."""
        record = self._records.find(address.key)
        if self._is_expired(record):
            raise NotFound(
                f"the checkpoint {address} expired at {record.expires_at:%Y-%m-%d %H:%M:%S} UTC; "
                "save with a longer ttl_seconds, or without one"
            )
        return record

    def folder(self, address: CheckpointAddress) -> Path:
        """Return the folder of a checkpoint; RequestRefused if a file is not as it was written."""
        record = self.find(address)
        folder = self._tensors(record)
        for path in record.damaged(folder):
            raise RequestRefused(
                f"{address} is damaged: {path} is not as it was written; load an older "
                "checkpoint, or restore the file from a copy"
            )
        return folder

    def find_all(self, run: str | None = None) -> list[CheckpointRecord]:
        """Return the checkpoints that can be loaded, newest first: all, or one run's."""
        self._delete_expired()
        records = [record for record in self._records.values() if run in (None, record.run)]
        alive = [record for record in records if not self._is_expired(record)]
        return sorted(alive, key=lambda record: record.created_at, reverse=True)

    def change(self, address: CheckpointAddress, **fields: object) -> None:
        with self._lock:
            record = self.find(address)
            self._records.put(address.key, record.model_copy(update=fields))

    def delete(self, address: CheckpointAddress) -> None:
        with self._lock:
            record = self.find(address)
            self._records.remove(address.key)
            self._drop(record)

    def expiry(self, ttl_seconds: int | None) -> datetime | None:
        """Return the time `ttl_seconds` from now; raise RequestRefused if that is out of range."""
        if ttl_seconds is None:
            return None
        if not 0 < ttl_seconds <= LONGEST_TTL:
            raise RequestRefused(
                f"ttl_seconds is {ttl_seconds}; give a number from 1 to {LONGEST_TTL} (ten years)"
            )
        return self._now() + timedelta(seconds=ttl_seconds)

    def _is_expired(self, record: CheckpointRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._now()

    def _tensors(self, record: CheckpointRecord) -> Path:
        return self._folder / record.run / record.kind / record.folder

    def _delete_expired(self) -> None:
        with self._lock:
            for record in self._records.values():
                if self._is_expired(record):
                    shutil.rmtree(self._tensors(record), ignore_errors=True)

    def _delete_unfinished(self) -> None:
        """Delete folders that an engine left behind when it was killed while saving.

        If a record is damaged, a folder without a record may be the record's, and is kept.
        """
        if self._records.damaged:
            return
        recorded = {self._tensors(record) for record in self._records.values()}
        for folder in self._folder.glob("*/*/*/"):
            if folder not in recorded:
                shutil.rmtree(folder)
