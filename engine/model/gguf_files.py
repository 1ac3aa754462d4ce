"""GGUF files as base models: dequantised once, into a folder of bfloat16 in the user's cache."""

import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import RequestRefused

SUFFIX = ".gguf"
ORIGIN = "origin.json"
"""File of a prepared folder that says where its model comes from; it is written last."""


def prepare_gguf(file: Path) -> Path:
    """Return the folder of a GGUF file's model, named by its checksum; the first call writes it.

    Raise RequestRefused for a file that cannot be read, or whose architecture is unknown.
    """
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
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
    """Write the model's folder beside its final place, and move it there when it is whole."""
    origin = _read_origin(file) | {"file": file.name, "sha256": checksum}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as beside:
        unfinished = Path(beside) / folder.name
        unfinished.mkdir()
        _dequantise(file, unfinished)
        (unfinished / ORIGIN).write_text(json.dumps(origin, indent=2))
        if not folder.exists():  # another process may have been as fast
            unfinished.rename(folder)


def _read_origin(file: Path) -> dict[str, str]:
    """Read who made the model and its licence, and refuse what cannot be dequantised."""
    try:
        from gguf import GGUFReader
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    except ImportError as error:
        raise RequestRefused(
            f"{error.name} is not installed, which reads GGUF files: pip install gguf accelerate"
        ) from error
    try:
        fields = GGUFReader(file).fields
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise RequestRefused(
            f"{file} is cut short or damaged ({error}); download it again"
        ) from error
    found = {
        name: str(fields[f"general.{name}"].contents())
        for name in ("architecture", "name", "organization", "license")
        if f"general.{name}" in fields
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
        reason = str(error).strip().splitlines()[0]
        raise RequestRefused(
            f"transformers cannot read {file}: {reason}; give the model's own folder"
        ) from error
    for quantised in (network, "hf_quantizer"), (network.config, "quantization_config"):
        delattr(*quantised)  # what is saved is dequantised
    network.save_pretrained(folder)
