"""The id of a base model → its folder, and an entry in the Hugging Face cache for local ids."""

import os
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from uuid import uuid4

from engine.errors import UserError

LOCAL = "local/"
SHIPPED = {"local/tiny-chat": Path(__file__).parent / "tiny_chat"}
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
TOKENIZER_FILES = (
    "config.json",
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
    """A model's public name and where its files are."""

    name: str
    folder: Path

    def is_called(self, name: str) -> bool:
        return name == self.name or (
            "/" in name and not name.startswith(LOCAL) and Path(name).resolve() == self.folder
        )


def find(base_model: str) -> BaseModel:
    """Raises UserError where there is no such model. A hub name may be downloaded."""
    if base_model.startswith(LOCAL):
        if base_model not in SHIPPED:
            known = ", ".join(SHIPPED)
            raise UserError(f"there is no base model {base_model}; known are {known}, or a folder")
        return BaseModel(base_model, _checked(SHIPPED[base_model]))
    folder = Path(base_model).expanduser()
    if folder.is_dir() or not _is_hub_name(base_model):
        checked = _checked(folder)
        return BaseModel(_public_name(checked), checked)
    return BaseModel(base_model, _checked(_downloaded(base_model)))


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"the base model folder {folder} is not there")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json, so it is not a Hugging Face model")
    return folder.resolve()


def _public_name(folder: Path) -> str:
    """The SDK reads a name of two slashes as <org>/<model>/<variant> and drops the last part."""
    return str(folder) if str(folder).count("/") != 2 else f"{LOCAL}{folder.name}"


def _is_hub_name(base_model: str) -> bool:
    parts = base_model.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts)


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"there is no folder {name}, and no such model on the hub can be had: {reason}"
        ) from error


def enter_in_cache(model: BaseModel) -> None:
    """Let `AutoTokenizer.from_pretrained(name)` find a local id, offline, as it finds a hub's."""
    if not model.name.startswith(LOCAL):
        return
    files = sorted({path for pattern in TOKENIZER_FILES for path in model.folder.glob(pattern)})
    digest = sha1(usedforsecurity=False)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    revision = digest.hexdigest()
    entry = cache_folder() / f"models--{model.name.replace('/', '--')}"
    snapshot = entry / "snapshots" / revision
    for path in files:
        if not (snapshot / path.name).is_file():
            _appear(snapshot / path.name, path.read_bytes())
    _appear(entry / "refs" / "main", revision.encode())


def cache_folder() -> Path:
    """Where huggingface_hub looks, read from the environment at call time."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return (Path(home) if home else default).expanduser() / "hub"


def _appear(path: Path, content: bytes) -> None:
    """Whole, also where several engines start at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    aside.write_bytes(content)
    aside.replace(path)
