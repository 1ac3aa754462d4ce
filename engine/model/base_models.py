"""Base models by id: their folders, Hugging Face cache entries for local ids, and GGUF files.

A GGUF file is dequantised once, into a folder of bfloat16 in the user's cache.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError

from ratchet.durable.files import PARTIAL, appearing_folder, lock_file, sha256_of, write_file
from ratchet.engine.errors import RequestRefused

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel

    from ratchet.engine.model.language_model import Loaded


SUFFIX = ".gguf"
ORIGIN = "origin.json"
"""File of a prepared folder that says where its model comes from; it is written last."""
LOCK = ".lock"
UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError),
    *(StrictDataclassError, TypeError, ValueError),
)
"""What transformers raises for a file whose parts contradict each other."""


def prepare_gguf(file: Path) -> Path:
    """Return the folder of a GGUF file's model, named by its checksum; the first call writes it.

    Raise RequestRefused for a file that cannot be read, or whose architecture is unknown.
    """
    checksum = sha256_of(file)
    if checksum is None:
        raise RequestRefused(f"{file} cannot be read; give a GGUF file that you may read")
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
    origin = _origin_of(file, _read(file)) | {"file": file.name, "sha256": checksum}
    with _only_writer(folder.parent):
        if (folder / ORIGIN).is_file():
            return
        shutil.rmtree(folder, ignore_errors=True)  # without its origin it is not whole
        with appearing_folder(folder) as unfinished:
            _dequantise(file, unfinished)
            (unfinished / ORIGIN).write_text(json.dumps(origin, indent=2))


@contextmanager
def _only_writer(folders: Path) -> Iterator[None]:
    """Wait until no other process prepares a model, and delete what killed processes have left."""
    folders.mkdir(parents=True, exist_ok=True)
    with (folders / LOCK).open("w") as file:
        lock_file(file, wait=True)
        for left in folders.glob(f".*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _read(file: Path) -> "GGUFReader":
    """Open a GGUF file; RequestRefused if it is not whole, or if no package reads it."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RequestRefused(
            f"{error.name} is not installed, which reads GGUF files: pip install gguf accelerate"
        ) from error

    class BoundedReader(GGUFReader):
        """A reader that stops at the end of the file, where its parent goes on to any count."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError(f"it has {count:,} values at byte {offset:,}, and ends before")
            return found

    try:
        return BoundedReader(file)
    except UNREADABLE as error:
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

    from ratchet.engine.model.language_model import check_loaded

    where, name = str(file.parent), file.name
    try:
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
        network, loaded = cast(
            "tuple[PreTrainedModel, Loaded]",
            AutoModelForCausalLM.from_pretrained(
                where,
                gguf_file=name,
                dtype=torch.bfloat16,
                ignore_mismatched_sizes=True,  # they are refused below
                output_loading_info=True,
            ),
        )
    except UNREADABLE as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")
        raise RequestRefused(
            f"transformers cannot read {file}: {reason}; give the model's own folder"
        ) from error
    check_loaded(str(file), loaded)
    for quantised in (network, "hf_quantizer"), (network.config, "quantization_config"):
        delattr(*quantised)  # what is saved is dequantised
    network.save_pretrained(folder)


LOCAL = "local/"
TINY_CHAT = "local/tiny-chat"
SHIPPED = Path(__file__).parents[1] / "tiny_chat"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
CONFIG_FILE = "config.json"
TOKENIZER_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model's public name, the folder of its files, and the file that it came from."""

    name: str
    folder: Path
    file: Path | None = None

    def has_name(self, name: str) -> bool:
        """Tell whether a client means this model, by its name, its folder or its file."""
        if (fetched := find_fetched(name)) is not None:
            return fetched.resolve() == self.file
        return name == self.name or (
            "/" in name
            and not name.startswith(LOCAL)
            and Path(name).expanduser().resolve() in (self.folder, self.file)
        )


def find(base_model: str) -> BaseModel:
    """Find a base model by local id, name of a fetched model, folder, GGUF file or hub name.

    A hub model is downloaded and a GGUF file is dequantised if that has not been done.

    Raise RequestRefused if there is no such model.
    """
    if base_model.startswith(LOCAL):
        if base_model != TINY_CHAT:
            raise RequestRefused(
                f"there is no base model {base_model}; give {TINY_CHAT}, or a folder"
            )
        return BaseModel(base_model, _check_folder(SHIPPED))
    folder = find_fetched(base_model) or Path(base_model).expanduser()
    if folder.suffix == SUFFIX and folder.is_file():
        prepared = prepare_gguf(folder)
        return BaseModel(_public_name(prepared), prepared, folder.resolve())
    parts = base_model.split("/")  # two, of a name on the hub
    if folder.is_dir() or len(parts) != 2 or any(part[:1] in ("", ".") for part in parts):
        checked = _check_folder(folder)
        return BaseModel(_public_name(checked), checked)
    return BaseModel(base_model, _check_folder(_download(base_model)))


def _check_folder(folder: Path) -> Path:
    if not (folder / CONFIG_FILE).is_file():
        raise RequestRefused(
            f"there is no {folder / CONFIG_FILE}; give the folder of a Hugging Face model"
        )
    return folder.resolve()


def _public_name(folder: Path) -> str:
    """Return the folder's name for clients.

    The SDK reads a name with two slashes as <org>/<model>/<variant> and drops the last part.
    """
    return str(folder) if str(folder).count("/") != 2 else f"{LOCAL}{folder.name}"


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0].removesuffix(".")
        raise RequestRefused(
            f"there is no folder {name}, and the hub model cannot be downloaded: {reason}; "
            "check the name"
        ) from error


def add_to_cache(model: BaseModel) -> None:
    """Enter a local id in the cache, so that `AutoTokenizer.from_pretrained` finds it offline."""
    if not model.name.startswith(LOCAL):
        return
    files = sorted({path for pattern in TOKENIZER_FILES for path in model.folder.glob(pattern)})
    contents = {path.name: path.read_bytes() for path in files}
    config = json.loads(contents[CONFIG_FILE])
    config.pop("dtype", None)  # of the weights; a client would import torch for it
    contents[CONFIG_FILE] = json.dumps(config).encode()
    said = b"".join(name.encode() + content for name, content in contents.items())
    revision = sha1(said, usedforsecurity=False).hexdigest()
    entry = Path(constants.HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}"
    snapshot = entry / "snapshots" / revision
    for name, content in contents.items():
        if not (snapshot / name).is_file():
            write_file(snapshot / name, content)
    write_file(entry / "refs" / "main", revision.encode())
