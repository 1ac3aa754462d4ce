"""A run on disk: its folder, the manifest that binds it to a recipe, and the lock on it."""

import fcntl
import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.errors import UserError
from tasks.files import write_text

RECORDED_VERSIONS = ("ratchet-rl", "tinker", "torch", "transformers", "renderers", "prefect")


class RunError(UserError):
    """The run cannot be opened as asked."""


def runs_root() -> Path:
    """Where runs lie: RATCHET_RUNS, or `runs` in the working directory."""
    return Path(os.environ.get("RATCHET_RUNS", "runs"))


def latest_run(agent: str) -> Path:
    """The newest run of an agent."""
    manifests = list(runs_root().glob("*/manifest.json"))
    of_agent = [path for path in manifests if _read(path)["recipe"]["agent"] == agent]
    if not of_agent:
        raise RunError(f"{runs_root()} has no run of the agent {agent!r}; train one first")
    return max(of_agent, key=lambda path: _read(path)["created"]).parent


@contextmanager
def opened_run(name: str, recipe: dict[str, Any], fingerprint: str) -> Iterator[Path]:
    """The run's folder, made if it is new; while it is open no other process can open it."""
    if not name or Path(name).name != name or name.startswith("."):
        raise RunError(f"{name!r} cannot name a run: use letters, digits, '-' and '_'")
    folder = runs_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _bind(folder / "manifest.json", recipe, fingerprint)
        yield folder


def recipe_of(folder: Path) -> dict[str, Any]:
    """The recipe a run is bound to."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        raise RunError(f"there is no run at {folder}; `ratchet runs` lists those there are")
    return _read(manifest)["recipe"]


def _bind(manifest: Path, recipe: dict[str, Any], fingerprint: str) -> None:
    if not manifest.exists():
        write_text(manifest, json.dumps(_describe(recipe, fingerprint), indent=2) + "\n")
        return
    bound = _read(manifest)
    if bound["fingerprint"] != fingerprint:
        differing = ", ".join(_differences(bound["recipe"], recipe))
        raise RunError(
            f"the run {manifest.parent} was started with another recipe, which differs in "
            f"{differing}; give the same values, or another name with --run"
        )


def _describe(recipe: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    dataset = Path(recipe["dataset"]["path"])
    return {
        "created": datetime.now(UTC).isoformat(),
        "recipe": recipe,
        "fingerprint": fingerprint,
        "dataset_sha256": hashlib.sha256(dataset.read_bytes()).hexdigest(),
        "versions": {name: version(name) for name in RECORDED_VERSIONS},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _differences(old: object, new: object, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [
            difference
            for key in keys
            for difference in _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{path}: {old!r} → {new!r}"]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The kernel drops this lock when its process dies, however it dies."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                f"the run {folder} is open in {file.read().strip()}; wait for it"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _read(manifest: Path) -> dict[str, Any]:
    return json.loads(manifest.read_text(encoding="utf-8"))
