"""Base models on this machine, before an engine loads one: by name, as a folder or a file.

The texts of tokens are by a tokenizer's file that is on this machine; nothing is fetched.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ratchet.adapters.errors import ServiceError, did_you_mean
from ratchet.adapters.tinker.costs import prices_of
from ratchet.adapters.tinker.engines import LOCAL, needs_engine, prepare_base
from ratchet.adapters.tinker.known_models import KNOWN, dequantised_folder, is_fetched
from ratchet.durable.files import sha256_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
WEIGHTS_OF_HUB = ("model.safetensors", "model.safetensors.index.json")
COPIES = 2
"""Copies of the weights in an engine: as they were read, and as products of few rows take them."""
GIB = 2**30

SHIPPED = f"{LOCAL}tiny-chat"
GGUF = ".gguf"
ORIGIN = "origin.json"
"""File in the folder of a GGUF file's model that the engine writes."""

CONTEXT_KEYS = ("max_position_embeddings", "max_served_positions")
"""Keys of a model's config by which the engine knows the longest text that it serves."""
SPACE = "\u2581"
"""Mark by which SentencePiece writes the space before a word."""

Decode = Callable[[Sequence[int]], str]
"""Tokens → their text, also of special ones; the replacement character for a part of one."""

log = logging.getLogger(__name__)


def base_folder(base: str) -> Path | None:
    """Return the folder of a base model's files; None if only an engine or a service has them.

    The first call with a GGUF file dequantises it, which takes seconds to minutes.
    """
    path = _place(base)
    if path.suffix == GGUF:
        return _dequantised(path)
    return path if path.is_dir() else None


def is_here(base: str) -> bool:
    """Tell whether a base is a file or a folder of this machine, or has been fetched."""
    return (KNOWN[base].file if base in KNOWN else Path(base).expanduser()).exists()


def name_for_clients(base: str) -> str:
    """Return the name by which the SDK asks for a base and finds its tokenizer.

    The name of a GGUF file, also of a fetched file, is its dequantised folder. The SDK drops the
    last part of a name with two slashes, so that a folder's has more.
    """
    place = _place(base)
    if place.suffix == GGUF:
        return str(_dequantised(place))
    return f"/.{place.resolve()}" if base.count("/") == 2 and place.exists() else base


def check_base(base: str) -> None:
    """Refuse (ServiceError) a base model that the engine of this machine, if used, cannot load."""
    if base == SHIPPED or not needs_engine(base):
        return
    folder = base_folder(base)
    if folder is not None:
        _check_folder(folder)
        return
    owner, _, name = base.partition("/")
    if base.startswith(LOCAL) or owner[:1] in "~." or not name or "/" in name:
        near = did_you_mean(base, [SHIPPED, *KNOWN])
        raise ServiceError(
            f"there is no base model {base}{near}; give {SHIPPED}, "
            "a model that `ratchet fetch` has brought, the folder of a Hugging Face model, a GGUF "
            "file, or a name of Hugging Face's hub"
        )
    if prices_of(base) and not any(_cached(base, file) for file in WEIGHTS_OF_HUB):
        raise ServiceError(
            f"{base} is a model of the hosted service, and no key of it is set: set TINKER_API_KEY "
            "to yours, or TINKER_BASE_URL to a server of your own that has the model; or fetch it "
            f"for this machine by `hf download {base}`"
        )


def _check_folder(folder: Path) -> None:
    """Refuse (ServiceError) a folder of no model, or of one that does not fit into the memory.

    What else is wrong in it, the engine that loads it finds.
    """
    sizes = [file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not (folder / CONFIG_FILE).is_file() or not sizes:
        raise ServiceError(
            f"{folder} has no config.json, or no weights (model.safetensors); give the folder of a "
            "Hugging Face model, with all of its files"
        )
    needed, free = COPIES * sum(sizes), psutil.virtual_memory().available
    if needed > free:
        raise ServiceError(
            f"the model in {folder} needs {needed / GIB:.1f} GiB of memory for its weights alone, "
            f"and {free / GIB:.1f} are free; end other programs, or take a smaller model"
        )


def read_licence(folder: Path) -> str:
    """Read the licence that a model's card names; empty if none does."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    named = re.search(r"\A---\n(?:.*\n)*?license: *(\S+) *\n", text.partition("\n---\n")[0] + "\n")
    return named.group(1) if named else ""


def read_origin(base: str) -> dict[str, object]:
    """Read who made the model of a GGUF file, its licence and its checksum; empty of any other."""
    place = _place(base)
    if place.suffix != GGUF:
        return {}
    return json.loads((_dequantised(place) / ORIGIN).read_text(encoding="utf-8"))


def _place(base: str) -> Path:
    """Return the file or the folder that a base would be, which need not be there.

    A known model's name means its fetched file, also where a folder has that name; ServiceError
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
    made = dequantised_folder(sha256_of(file) or "")
    if (made / ORIGIN).is_file():  # it is written last
        return made
    log.warning("dequantising %s, which may take a minute", file)
    return prepare_base(str(file))


def find_decoder(base_model: str) -> Decode | None:
    """Return what decodes tokens of a base model: a folder's, or one in the hub's cache.

    None if its tokenizer is not on this machine. An engine puts its own model there.
    """
    path = _find_file(base_model)
    if path is None:
        return None
    tokenizer = _open(path)

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode([*tokens], skip_special_tokens=False)
        first = tokenizer.id_to_token(tokens[0]) if tokens else None
        begins_a_word = (first or "").startswith(SPACE)
        return f" {text}" if begins_a_word and not text.startswith(" ") else text

    return decode


def has_tokenizer(base_model: str) -> bool:
    return base_model.startswith(LOCAL) or _find_file(base_model) is not None


def find_context(tokenizer: object) -> int | None:
    """Return the most tokens of a prompt with its answer, by the config of a tokenizer's model.

    None if its config is not to be had, or does not say it.
    """
    from huggingface_hub import hf_hub_download

    place = Path(name := str(getattr(tokenizer, "name_or_path", "")))
    try:
        folder = place if place.is_dir() else Path(hf_hub_download(name, CONFIG_FILE)).parent
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the hub's client names no model so, or may not ask for it
        return None
    of_text = config.get("text_config", config)
    found = [of_text.get(key) for key in CONTEXT_KEYS] if isinstance(of_text, dict) else []
    return max((length for length in found if isinstance(length, int)), default=None)


def open_tokenizer(base_model: str) -> object:
    """Open the whole tokenizer of a base model, without its weights or a service.

    ServiceError if neither this machine nor the hub, where it may be asked, has it.
    """
    from renderers.base import load_tokenizer

    folder = prepare_base(base_model) if base_model.startswith(LOCAL) else base_folder(base_model)
    try:
        return load_tokenizer(base_model if folder is None else str(folder))
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ServiceError(
            f"the tokenizer of {base_model} cannot be loaded here ({said}); "
            "allow it to be fetched by --online, or give --set model.base and a folder with all of "
            "its files"
        ) from error


@lru_cache(maxsize=4)
def _open(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer  # which only a question about texts needs

    return Tokenizer.from_file(str(path))


def _find_file(base_model: str) -> Path | None:
    if is_here(base_model) and (folder := base_folder(base_model)):
        return folder / TOKENIZER_FILE if (folder / TOKENIZER_FILE).is_file() else None
    return _cached(base_model, TOKENIZER_FILE)


def _cached(base_model: str, file: str) -> Path | None:
    """Return a file of a model in the hub's cache, if it is there."""
    # Not before: the hub's client reads when it is imported whether it is offline.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(base_model, file)
    except HFValidationError:  # a folder that is gone
        return None
    return Path(cached) if isinstance(cached, str | os.PathLike) else None
