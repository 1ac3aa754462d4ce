"""Base models on this machine, before an engine loads one: by name, as a folder or a file."""

import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

from adapters.errors import ServiceError, did_you_mean
from adapters.tinker.engines import LOCAL, needs_engine, prepare_base
from adapters.tinker.known_models import KNOWN, is_fetched
from adapters.tinker.model_files import check_folder, read_json

log = logging.getLogger(__name__)

SHIPPED = f"{LOCAL}tiny-chat"
GGUF, MAGIC = ".gguf", b"GGUF"
ORIGIN = "origin.json"
"""File in the folder of a GGUF file's model that the engine writes."""


def base_folder(base: str) -> Path | None:
    """Return the folder of a base model's files, None for one that an engine or a service has.

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

    That of a GGUF file, also a fetched one, is its dequantised folder. The SDK drops the last part
    of a name with two slashes, so that a folder's has more.
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

    A known model's name is that of its fetched file, also where a folder is called so; ServiceError
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
    log.warning("reading %s: a new file is dequantised first, which may take a minute", file)
    return prepare_base(str(file))
