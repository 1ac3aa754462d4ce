"""Base models on this machine, before an engine loads one: their files and their size."""

import json
import logging
import struct
from functools import cache
from math import prod
from pathlib import Path
from typing import cast

import psutil

from adapters.errors import ServiceError, did_you_mean
from adapters.tinker.engines import LOCAL, needs_engine
from adapters.tinker.fetching import is_fetched
from adapters.tinker.known_models import KNOWN
from adapters.tinker.preparing import prepare_base

log = logging.getLogger(__name__)

SHIPPED = f"{LOCAL}tiny-chat"
GGUF, MAGIC = ".gguf", b"GGUF"
ORIGIN = "origin.json"
"""File in the folder of a GGUF file's model that the engine writes."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
FLOAT32 = 4
"""Bytes of a number as the engine keeps it."""
COPIES = 2
"""Copies of the weights: as they were read, and as products of few rows take them."""
MICROBATCH_TOKENS, MICROBATCH_WORK = 2048, 2**37
"""The engine's bounds on what a thread of it trains at once."""
GIB = 2**30


def base_folder(base: str) -> Path | None:
    """Return the folder of a base model's files, None for one that an engine or a service has.

    The first call with a GGUF file dequantises it, which takes seconds to minutes.
    """
    path = _place(base)
    if path.suffix == GGUF:
        return _dequantised(path)
    return path if path.is_dir() else None


def is_here(base: str) -> bool:
    """Tell whether a base is a file or a folder of this machine, or has been fetched."""
    place = KNOWN[base].file if base in KNOWN else Path(base).expanduser()
    return place.exists()


def name_for_clients(base: str) -> str:
    """Return the name by which the SDK asks for a base and finds its tokenizer.

    That of a GGUF file, also a fetched one, is its dequantised folder.
    """
    place = _place(base)
    return str(_dequantised(place)) if place.suffix == GGUF else base


def check_base(base: str) -> None:
    """Refuse (ServiceError) a base model that the engine of this machine, if used, cannot load."""
    if base == SHIPPED or not needs_engine(base):
        return
    folder = base_folder(base)
    if folder is not None:
        _check_files(folder)
        _check_memory(folder)
        return
    owner, _, name = base.partition("/")
    if base.startswith(LOCAL) or not owner.strip("~.") or not name or "/" in name:
        near = did_you_mean(base, [SHIPPED, *KNOWN])
        raise ServiceError(
            f"there is no base model {base}{near}; give {SHIPPED}, "
            "a model that `ratchet fetch` has brought, the folder of a Hugging Face model, a GGUF "
            "file, or a name of Hugging Face's hub"
        )


def read_origin(base: str) -> dict[str, object]:
    """Read who made the model of a GGUF file, its licence and its checksum; empty of any other."""
    place = _place(base)
    return _read_json(_dequantised(place) / ORIGIN) if place.suffix == GGUF else {}


def check_template(folder: Path) -> None:
    """Refuse (ServiceError) a model's folder without a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return
    if not _read_json(folder / "tokenizer_config.json").get("chat_template"):
        raise ServiceError(
            f"the model in {folder} has no chat template, so model.renderer cannot be auto; give "
            "it the name of a renderer, or jinja: and a file with a template"
        )


def _place(base: str) -> Path:
    """Return the file or the folder that a base would be, which need not be there.

    A known model's name is that of its fetched file, also where a folder is called so; ServiceError
    unless that file is there and whole.
    """
    return _fetched(base) if base in KNOWN else Path(base).expanduser()


@cache
def _fetched(name: str) -> Path:
    model = KNOWN[name]
    if not is_fetched(model):
        fact = "is not as it was fetched" if model.file.exists() else "has not been fetched"
        raise ServiceError(
            f"the base model {name} {fact} ({model.file}); give `ratchet fetch {name}`"
        )
    return model.file


@cache
def _dequantised(file: Path) -> Path:
    """Return the folder that the engine makes of a GGUF file."""
    if not file.is_file():
        raise ServiceError(f"there is no GGUF file {file}; check the path")
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ServiceError(f"{file} does not begin as a GGUF file; download it again")
    log.warning("reading %s: a new file is dequantised first, which may take a minute", file)
    return prepare_base(str(file))


def _check_files(folder: Path) -> None:
    """Refuse a folder that lacks a part of a model."""
    config = folder / "config.json"
    if not config.is_file():
        raise ServiceError(f"{folder} has no config.json; give the folder of a Hugging Face model")
    if "model_type" not in _read_json(config):
        raise ServiceError(f"{config} names no model_type; give the folder of a Hugging Face model")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise ServiceError(f"{folder} has no weights (model.safetensors); download them too")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ServiceError(f"{folder} has no tokenizer (tokenizer.json); download it too")


def _check_memory(folder: Path) -> None:
    """Refuse a model that needs more memory than is free, weights and training together."""
    weights = sum(_count_weights(file) for file in folder.glob("*.safetensors"))
    kept = COPIES * FLOAT32 * weights
    needed = kept + _training_bytes(_read_json(folder / "config.json"), weights)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ServiceError(
            f"the model in {folder} needs {needed / GIB:.1f} GiB of memory ({kept / GIB:.1f} for "
            f"its weights), and {free / GIB:.1f} are free; end other programs, or take a smaller "
            "model"
        )


def _training_bytes(config: dict[str, object], weights: int) -> int:
    """Estimate the memory of the activations of a Llama in training, in one thread.

    In SmolLM2-135M a layer was found to keep 16 numbers for each of the hidden size and 6 for each
    of the MLP's, and the head 3 for each of the vocabulary.
    """
    sizes = "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"
    found = [config.get(name) for name in sizes]
    layers, hidden, inner, vocabulary = (one if isinstance(one, int) else 0 for one in found)
    of_token = FLOAT32 * (layers * (16 * hidden + 6 * inner) + 3 * vocabulary)
    return of_token * min(MICROBATCH_TOKENS, MICROBATCH_WORK // max(1, weights))


def _count_weights(file: Path) -> int:
    """Count the numbers in a file of safetensors by its header; ServiceError if the file is cut."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        ends = [tensor["data_offsets"][1] for tensor in tensors]
        counts = [prod(tensor["shape"]) for tensor in tensors]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"{file} is damaged; download it again") from error
    if file.stat().st_size < 8 + length + max(ends, default=0):
        raise ServiceError(f"{file} is cut short; download it again")
    return sum(counts)


def _read_json(file: Path) -> dict[str, object]:
    try:
        return cast(dict[str, object], json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ServiceError(f"{file} is not JSON ({error}); download it again") from error
