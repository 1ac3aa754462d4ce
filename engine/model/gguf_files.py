"""GGUF files as base models: dequantised once, into a folder of bfloat16 in the user's cache."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.disk import PARTIAL, atomic_folder, sha256_of
from engine.errors import RequestRefused

if TYPE_CHECKING:
    from gguf import GGUFReader

SUFFIX = ".gguf"
ORIGIN = "origin.json"
"""File of a prepared folder that says where its model comes from; it is written last."""
LOCK = ".lock"
BFLOAT16 = 2
"""Bytes of a weight in a prepared folder."""
MB = 10**6


def prepare_gguf(file: Path) -> Path:
    """Return the folder of a GGUF file's model, named by its checksum; the first call writes it.

    Raise RequestRefused for a file that cannot be read, or whose architecture is unknown.
    """
    checksum = sha256_of(file)
    folder = _cache() / "bases" / checksum[:16]
    if not (folder / ORIGIN).is_file():
        _write(file, checksum, folder)
    return folder


def find_fetched(name: str) -> Path | None:
    """Return the GGUF file that has been fetched by a plain name; None if there is none."""
    file = _cache() / "models" / f"{name}{SUFFIX}"
    return file if "/" not in name and file.is_file() else None


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ratchet"


def _write(file: Path, checksum: str, folder: Path) -> None:
    """Write the model's folder, which appears whole; another process may have been as fast."""
    opened = _read(file)
    origin = _origin_of(file, opened) | {"file": file.name, "sha256": checksum}
    with _only_writer(folder.parent):
        if (folder / ORIGIN).is_file():
            return
        _check_space(opened, folder)
        shutil.rmtree(folder, ignore_errors=True)  # without its origin it is not whole
        with atomic_folder(folder) as unfinished:
            _dequantise(file, unfinished)
            (unfinished / ORIGIN).write_text(json.dumps(origin, indent=2))


@contextmanager
def _only_writer(folders: Path) -> Iterator[None]:
    """Wait until no other process prepares a model, and delete what killed ones have left."""
    folders.mkdir(parents=True, exist_ok=True)
    with (folders / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or this process ends
        for left in folders.glob(f".*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _check_space(opened: "GGUFReader", folder: Path) -> None:
    """Refuse (RequestRefused) a model for which the disk has no space."""
    needed = BFLOAT16 * sum(int(tensor.n_elements) for tensor in opened.tensors)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise RequestRefused(
            f"the dequantised model needs {needed / MB:.1f} MB in {folder.parent}, and "
            f"{free / MB:.1f} are free; make space on its disk, or name a folder of another one by "
            "XDG_CACHE_HOME"
        )


def _read(file: Path) -> "GGUFReader":
    """Open a GGUF file; RequestRefused if it is not whole, or if no package reads it."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RequestRefused(
            f"{error.name} is not installed, which reads GGUF files: pip install gguf accelerate"
        ) from error
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise RequestRefused(
            f"{file} is cut short or damaged ({error}); download it again"
        ) from error


def _origin_of(file: Path, opened: "GGUFReader") -> dict[str, str]:
    """Return who made the model and its licence, and refuse what cannot be dequantised."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    found = {
        name: str(opened.fields[f"general.{name}"].contents())
        for name in ("architecture", "name", "organization", "license")
        if f"general.{name}" in opened.fields
    }
    architecture = found.get("architecture", "none")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        known = ", ".join(sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"}))
        raise RequestRefused(
            f"{file} has the architecture {architecture!r}, which transformers does not read from "
            f"GGUF files; it reads {known}"
        )
    return found


def _dequantise(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(file.parent), file.name
    try:
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
        network = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.bfloat16)
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].removesuffix(".")
        raise RequestRefused(
            f"transformers cannot read {file}: {reason}; give the model's own folder"
        ) from error
    for quantised in (network, "hf_quantizer"), (network.config, "quantization_config"):
        delattr(*quantised)  # what is saved is dequantised
    network.save_pretrained(folder)
