"""Texts of tokens, by a tokenizer's file that is on this machine; nothing is fetched."""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.tinker.bases import base_folder, is_here, read_json
from ratchet.adapters.tinker.engines import LOCAL, prepare_base

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
CONFIG_FILE = "config.json"
CONTEXT_KEYS = ("max_position_embeddings", "max_served_positions")
"""Keys of a model's config by which the engine knows the longest text that it serves."""
SPACE = "\u2581"
"""Mark by which SentencePiece writes the space before a word."""

Decode = Callable[[Sequence[int]], str]
"""Tokens → their text, with that of special tokens; of a part of a character, the replacement
character."""


def find_decoder(base_model: str) -> Decode | None:
    """Return what decodes tokens of a base model: a folder's, or one in the hub's cache.

    None if its tokenizer is not on this machine. The engine's own model is in the cache as well,
    once an engine has run.
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
    """Tell whether the tokenizer of a base model is on this machine."""
    return base_model.startswith(LOCAL) or _find_file(base_model) is not None


def find_context(tokenizer: object) -> int | None:
    """Return the most tokens of a prompt with its answer, by the config of a tokenizer's model.

    None if its config is not to be had, or does not say it.
    """
    from huggingface_hub import hf_hub_download

    place = Path(name := str(getattr(tokenizer, "name_or_path", "")))
    try:
        folder = place if place.is_dir() else Path(hf_hub_download(name, CONFIG_FILE)).parent
    except (OSError, ValueError):  # the hub's client names no model so, or may not ask for it
        return None
    config = read_json(folder / CONFIG_FILE)
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
        raise ServiceError(
            f"the tokenizer of {base_model} is not on this machine; allow it to be fetched by "
            "--online, or give --set model.base and the folder of the model"
        ) from error


@lru_cache(maxsize=4)
def _open(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer  # which only a question about texts needs

    return Tokenizer.from_file(str(path))


def _find_file(base_model: str) -> Path | None:
    if is_here(base_model) and (folder := base_folder(base_model)):
        return folder / FILE if (folder / FILE).is_file() else None
    # Not before: the hub's client reads when it is imported whether it is offline.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(base_model, FILE)
    except HFValidationError:  # a folder that is gone
        return None
    return Path(cached) if isinstance(cached, str | os.PathLike) else None
