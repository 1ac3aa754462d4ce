"""Base models on this machine, before an engine loads one: by name, as a folder or a file.

A folder is looked at before an engine loads it: its parts, their sizes and shapes.
"""

import json
import logging
import re
import struct
from contextlib import suppress
from functools import cache
from json import JSONDecodeError
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import psutil

from ratchet.adapters.errors import ServiceError, did_you_mean
from ratchet.adapters.tinker.engines import LOCAL, needs_engine, prepare_base
from ratchet.adapters.tinker.known_models import KNOWN, dequantised_folder, is_fetched
from ratchet.durable.files import sha256_of

if TYPE_CHECKING:
    from jinja2.ext import Extension


Shapes: TypeAlias = dict[str, list[int]]
"""Name of a tensor → its shape."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
INDICES = ("*.safetensors.index.json", "pytorch_model*.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
TORCH_BEGINNINGS = (b"PK", b"\x80\x02")
"""First bytes of a file of torch's: of a ZIP archive, or of an older file."""
EMBEDDING = "model.embed_tokens.weight"
"""The embedding's name in Llama and its like, where the config says its shape."""
FLOAT32 = 4
"""Bytes of a number as the engine keeps it."""
COPIES = 2
"""Copies of the weights: as they were read, and as products of few rows take them."""
MICROBATCH_TOKENS, MICROBATCH_WORK = 2048, 2**36
"""The engine's bounds on what a thread of it trains at once."""
GIB = 2**30
BROKEN_HEADER = (struct.error, ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading a file without a header of safetensors."""
LONGEST_HEADER = 10**8
"""Bytes of the header of a file of safetensors, as its own library bounds them."""


def check_folder(folder: Path) -> None:
    """Refuse (ServiceError) a folder that lacks a part of a model, or has a damaged part.

    Refuse also a model that needs more memory than is free, for its weights and its training.
    """
    config = _check_config(folder / "config.json")
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern) if file.is_file()]
    if not files:
        raise ServiceError(f"{folder} has no weights (model.safetensors); download them too")
    for index in (index for pattern in INDICES for index in folder.glob(pattern)):
        _check_index(index)
    shapes: Shapes = {}
    for file in files:
        shapes |= _read_shapes(file) if file.suffix == ".safetensors" else _check_torch_file(file)
    _check_tokenizer(folder)
    _check_embedding(folder, config, shapes)
    _check_memory(folder, config, shapes)


def read_licence(folder: Path) -> str:
    """Read the licence that a model's card names; empty if none does."""
    card = folder / "README.md"
    text = _read_text(card) if card.is_file() else ""
    named = re.search(r"\A---\n(?:.*\n)*?license: *(\S+) *\n", text.partition("\n---\n")[0] + "\n")
    return named.group(1) if named else ""


def check_template(folder: Path) -> None:
    """Refuse (ServiceError) a model's folder without a chat template, or with a broken one."""
    from jinja2 import Environment, TemplateSyntaxError

    template: object = read_json(folder / "chat_template.json").get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = _read_text(file)
    template = template or read_json(folder / "tokenizer_config.json").get("chat_template")
    if not template:
        raise ServiceError(
            f"the model in {folder} has no chat template, so model.renderer cannot be auto; give "
            "it the name of a renderer, or jinja: and a file with a template"
        )
    try:
        if isinstance(template, str):
            Environment(extensions=["jinja2.ext.loopcontrols", _generation()]).parse(template)
    except TemplateSyntaxError as error:
        raise ServiceError(
            f"the chat template in {folder} is not Jinja ({error.message}, line {error.lineno}); "
            "download it again, or give model.renderer the name of a renderer"
        ) from error


def read_json(file: Path) -> dict[str, object]:
    """Read a file of one JSON object; empty if it is not there, ServiceError if it is another."""
    if not file.exists():
        return {}
    if not (file.is_file() or file.is_dir()):  # a pipe has no end
        raise ServiceError(f"{file} is no file; download it again")
    try:
        found = json.loads(_read_text(file))
    except JSONDecodeError as error:
        raise ServiceError(f"{file} is not JSON ({error}); download it again") from error
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"{file} is damaged; download it again") from error
    if not isinstance(found, dict):
        raise ServiceError(f"{file} is not a JSON object; download it again")
    return cast(dict[str, object], found)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> ServiceError:
    return ServiceError(f"{file} cannot be read ({error.strerror}); mend that, or give another one")


def _check_config(file: Path) -> dict[str, object]:
    if not file.is_file():
        raise ServiceError(
            f"{file.parent} has no config.json; give the folder of a Hugging Face model"
        )
    config = read_json(file)
    if "model_type" not in config:
        raise ServiceError(f"{file} names no model_type; give the folder of a Hugging Face model")
    return config


def _check_index(file: Path) -> None:
    """Refuse an index of weights that names a file which is not there."""
    named = read_json(file).get("weight_map")
    if not isinstance(named, dict):
        raise ServiceError(f"{file} has no weight_map; download it again")
    files = sorted({str(name) for name in cast(dict[str, object], named).values()})
    if lacking := [name for name in files if not (file.parent / name).is_file()]:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ServiceError(
            f"{file.parent} has no {lacking[0]}{more}, which {file.name} names; download all of "
            f"the {len(files)} files"
        )


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ServiceError(f"{folder} has no tokenizer (tokenizer.json); download it too")
    read_json(folder / "tokenizer_config.json")
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file() and "model" not in read_json(tokenizer):
        raise ServiceError(f"{tokenizer} is no tokenizer; download it again")


def _check_embedding(folder: Path, config: dict[str, object], shapes: Shapes) -> None:
    """Refuse weights of another model than the config's, as the embedding tells them apart."""
    said, found = [config.get("vocab_size"), config.get("hidden_size")], shapes.get(EMBEDDING)
    if found is not None and all(isinstance(size, int) for size in said) and found != said:
        raise ServiceError(
            f"{folder} has weights of another model: its embedding is {found}, and its config.json "
            f"says {said}; download all of its files again"
        )


def _check_memory(folder: Path, config: dict[str, object], shapes: Shapes) -> None:
    weights = sum(map(prod, shapes.values()))
    kept = COPIES * FLOAT32 * weights
    needed = kept + _training_bytes(config, weights)
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
    of the MLP's, and the head 2 for each of the vocabulary.
    """
    sizes = "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"
    found = [config.get(name) for name in sizes]
    layers, hidden, inner, vocabulary = (one if isinstance(one, int) else 0 for one in found)
    of_token = FLOAT32 * (layers * (16 * hidden + 6 * inner) + 2 * vocabulary)
    return of_token * min(MICROBATCH_TOKENS, MICROBATCH_WORK // max(1, weights))


def _read_shapes(file: Path) -> Shapes:
    """Read the shapes in the header of a file of safetensors; ServiceError if the file is cut."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if LONGEST_HEADER < length <= size:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(opened.read(min(length, size)))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
        shapes = {name: [*map(int, tensor["shape"])] for name, tensor in tensors.items()}
    except OSError as error:
        raise _unreadable(file, error) from error
    except (*BROKEN_HEADER, RecursionError) as error:
        raise ServiceError(f"{file} is damaged; download it again") from error
    if size < 8 + length + end:
        raise ServiceError(f"{file} is cut short; download it again")
    return shapes


def _check_torch_file(file: Path) -> Shapes:
    """Refuse a file that torch did not write; its shapes are not known before it is loaded."""
    try:
        with file.open("rb") as opened:
            begins = opened.read(2)
    except OSError as error:
        raise _unreadable(file, error) from error
    if begins not in TORCH_BEGINNINGS:
        raise ServiceError(f"{file} does not begin as a file of torch; download it again")
    return {}


def _generation() -> type["Extension"]:
    """Return the extension for the blocks in which templates mark the assistant's text."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The blocks `generation`, whose text is written as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


log = logging.getLogger(__name__)

SHIPPED = f"{LOCAL}tiny-chat"
GGUF, MAGIC = ".gguf", b"GGUF"
ORIGIN = "origin.json"
"""File in the folder of a GGUF file's model that the engine writes."""


def base_folder(base: str) -> Path | None:
    """Return the folder of a base model's files; None if only an engine or a service has them.

    The first call with a GGUF file dequantises it, which takes seconds to minutes.
    """
    path = _place(base)
    if path.suffix == GGUF:
        return _dequantised(path)
    return path if _exists(path) and path.is_dir() else None


def is_here(base: str) -> bool:
    """Tell whether a base is a file or a folder of this machine, or has been fetched."""
    return _exists(KNOWN[base].file if base in KNOWN else _as_path(base))


def name_for_clients(base: str) -> str:
    """Return the name by which the SDK asks for a base and finds its tokenizer.

    The name of a GGUF file, also of a fetched file, is its dequantised folder. The SDK drops the
    last part of a name with two slashes, so that a folder's has more.
    """
    place = _place(base)
    if place.suffix == GGUF:
        return str(_dequantised(place))
    return f"/.{place.resolve()}" if base.count("/") == 2 and _exists(place) else base


def check_base(base: str) -> None:
    """Refuse (ServiceError) a base model that the engine of this machine, if used, cannot load."""
    if base == SHIPPED or not needs_engine(base):
        return
    folder = base_folder(base)
    if folder is not None:
        check_folder(folder)
        return
    owner, _, name = base.partition("/")
    if base.startswith(LOCAL) or owner[:1] in "~." or not name or "/" in name:
        near = did_you_mean(base, [SHIPPED, *KNOWN])
        raise ServiceError(
            f"there is no base model {base}{near}; give {SHIPPED}, "
            "a model that `ratchet fetch` has brought, the folder of a Hugging Face model, a GGUF "
            "file, or a name of Hugging Face's hub"
        )


def read_origin(base: str) -> dict[str, object]:
    """Read who made the model of a GGUF file, its licence and its checksum; empty of any other."""
    place = _place(base)
    return read_json(_dequantised(place) / ORIGIN) if place.suffix == GGUF else {}


def _place(base: str) -> Path:
    """Return the file or the folder that a base would be, which need not be there.

    A known model's name means its fetched file, also where a folder has that name; ServiceError
    unless that file is there and whole.
    """
    return _fetched(base) if base in KNOWN else _as_path(base)


def _as_path(base: str) -> Path:
    with suppress(RuntimeError):  # there is no user of that name
        return Path(base).expanduser()
    return Path(base)


def _exists(path: Path) -> bool:
    """Tell whether something is there; False also where nobody may look, or nothing can be."""
    try:
        return path.exists()
    except OSError:
        return False


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
    if not _exists(file) or not file.is_file():
        raise ServiceError(f"there is no GGUF file {file}; check the path")
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(MAGIC))
    except OSError as error:
        raise ServiceError(f"{file} cannot be read ({error.strerror}); mend that") from error
    if begins != MAGIC:
        raise ServiceError(f"{file} does not begin as a GGUF file; download it again")
    made = dequantised_folder(sha256_of(file) or "")
    if (made / ORIGIN).is_file():  # it is written last
        return made
    log.warning("dequantising %s, which may take a minute", file)
    return prepare_base(str(file))
