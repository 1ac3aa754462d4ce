"""Checksums of whole files, each of which carries its own SHA-256; and what damage asks for.

The digest stands after a key, and is computed with zeros in its place: in Parquet in the footer's
metadata, in JSON in the object or in the last row. Other readers ignore it.
"""

import hashlib
from pathlib import Path

from adapters.errors import UserError

KEY = "ratchet.sha256"
BLANK = "0" * 64

PARQUET = f"{KEY}\x18@".encode()
"""What stands before the digest: the key, and in Thrift's compact protocol a string's header and
its length, 64."""

MADE_FROM = {
    "spans": "journal",
    "trajectories": "spans",
    "references": "trajectories",
    "teachers": "trajectories",
    "rewards": "trajectories",
    "datums": "trajectories",
    "text_teachers": "texts.parquet",
    "expert": "expert_texts.parquet",
}
"""Folder of a run → the folder whose files its own are made from."""

_AGAIN = "Remove the line and all that follow it, and resume the run: "
REMEDIES = {
    "manifest.json": "Restore it from a copy: nothing else says what the run is bound to",
    "owners.jsonl": "Delete it, and resume the run: it only says who has had the run open",
    "arrivals.jsonl": "Restore it from a copy: nothing else says what made the steps",
    "metrics.jsonl": f"{_AGAIN}the steps are measured again",
    "checkpoints.jsonl": f"{_AGAIN}their checkpoints are made again from the recorded datums",
}
"""What to do about a damaged file that is not made from others, by its name."""


class Damaged(UserError):
    """Refusal of a file that is not as it was written."""


def stamp(path: Path, key: bytes = PARQUET) -> None:
    """Replace the BLANK after the key by the digest."""
    data = path.read_bytes()
    start = data.rindex(key) + len(key)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(_digest(data, start))


def verified(path: Path) -> Path:
    """Return the path if every byte of the file is as it was written; otherwise Damaged."""
    intact(path)
    return path


def intact(path: Path, key: bytes = PARQUET) -> bytes:
    """Read the bytes of a file; Damaged if they are not as they were written."""
    data = path.read_bytes()
    found = data.rfind(key)
    start = found + len(key)
    if found < 0:
        raise Damaged(f"{path} is damaged: it has no checksum. {remedy(path)}")
    if data[start : start + len(BLANK)] != _digest(data, start):
        raise Damaged(
            f"{path} is damaged: its checksum does not fit its {len(data)} bytes. {remedy(path)}"
        )
    return data


def _digest(data: bytes, start: int) -> bytes:
    """Compute the digest that stands at `start`."""
    digest = hashlib.sha256(data[:start])
    digest.update(BLANK.encode())
    digest.update(data[start + len(BLANK) :])
    return digest.hexdigest().encode()


def remedy(path: Path) -> str:
    """Say what to do about a damaged file of a run."""
    if path.name in REMEDIES:
        return REMEDIES[path.name]
    source = MADE_FROM.get(path.parent.name)
    of = f" of {_home(path, source) / source}" if source else ""
    return f"Delete it, and resume the run: it is made anew{of}"


def _home(path: Path, source: str) -> Path:
    """Find the folder that has `source`: rollouts lie in the run's folder, not in a policy's."""
    own = path.parents[1]
    return next((folder for folder in path.parents[1:4] if (folder / source).exists()), own)
