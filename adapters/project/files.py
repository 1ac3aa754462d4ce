"""Files of the project: of the working folder, or else of the examples that Ratchet carries."""

from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[2]
_IN_A_WHEEL = _PACKAGES / "ratchet_examples"
EXAMPLES = _IN_A_WHEEL if _IN_A_WHEEL.is_dir() else _PACKAGES
"""The folder that holds the examples' agents/, datasets/ and prefect.yaml."""


def locate(path: Path) -> Path:
    """Return where a file of the project lies; the path as it is if the project lacks the file."""
    carried = EXAMPLES / path
    return carried if carried.exists() and not path.exists() else path
