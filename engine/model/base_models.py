"""Base models by id: their folders, and Hugging Face cache entries for local ids."""

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

from huggingface_hub import constants

from durable.files import write_file
from engine.errors import RequestRefused
from engine.model.gguf_files import SUFFIX, find_fetched, prepare_gguf

LOCAL = "local/"
SHIPPED = {"local/tiny-chat": Path(__file__).parents[1] / "tiny_chat"}
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
    """Find a base model by local id, plain name of a fetched one, folder, GGUF file or hub name.

    A hub model is downloaded and a GGUF file is dequantised if that has not been done.

    Raise RequestRefused if there is no such model.
    """
    if base_model.startswith(LOCAL):
        if base_model not in SHIPPED:
            known = ", ".join(SHIPPED)
            raise RequestRefused(
                f"there is no base model {base_model}; known are {known}, or a folder"
            )
        return BaseModel(base_model, _check_folder(SHIPPED[base_model]))
    folder = find_fetched(base_model) or Path(base_model).expanduser()
    if folder.suffix == SUFFIX and folder.is_file():
        prepared = prepare_gguf(folder)
        return BaseModel(_public_name(prepared), prepared, folder.resolve())
    if folder.is_dir() or not _is_hub_name(base_model):
        checked = _check_folder(folder)
        return BaseModel(_public_name(checked), checked)
    return BaseModel(base_model, _check_folder(_download(base_model)))


def _check_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise RequestRefused(
            f"the base model folder {folder} does not exist; give a Hugging Face model folder"
        )
    if not (folder / "config.json").is_file():
        raise RequestRefused(
            f"{folder} contains no config.json; give the folder of a Hugging Face model"
        )
    return folder.resolve()


def _public_name(folder: Path) -> str:
    """Return the folder's name for clients.

    The SDK reads a name with two slashes as <org>/<model>/<variant> and drops the last part.
    """
    return str(folder) if str(folder).count("/") != 2 else f"{LOCAL}{folder.name}"


def _is_hub_name(base_model: str) -> bool:
    parts = base_model.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts)


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
    digest = sha1(usedforsecurity=False)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    revision = digest.hexdigest()
    entry = Path(constants.HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}"
    snapshot = entry / "snapshots" / revision
    for path in files:
        if not (snapshot / path.name).is_file():
            write_file(snapshot / path.name, path.read_bytes())
    write_file(entry / "refs" / "main", revision.encode())
