"""A run on disk: its folder, the manifest that binds it to a recipe, and the lock on it."""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.calls import POLICY
from adapters.children import keep_from_children
from adapters.door.roles import policy_of
from adapters.errors import UserError
from tasks.storage.files import write_text

APART = ("evaluations", "dryruns")
"""Folders of what is kept as a run is and trains nothing, so that no agent's newest run is one."""

POLICIES = "policies"
"""The folder in a run where each policy but the main one has its own, in the run's own shape."""

RECORDED_VERSIONS = ("ratchet-rl", "tinker", "torch", "transformers", "renderers", "prefect")


class RunError(UserError):
    """The run cannot be opened as asked."""


def runs_root() -> Path:
    """Where runs lie: RATCHET_RUNS, or `runs` in the working directory."""
    return Path(os.environ.get("RATCHET_RUNS", "runs"))


def latest_run(agent: str, roles: Mapping[str, str]) -> Path:
    """The newest run of an agent with these roles; who helps in them may differ, not who trains."""
    manifests = {path.parent: _read(path) for path in runs_root().glob("*/manifest.json")}
    wanted = agent, _trained(roles)
    created = {
        folder: manifest["created"]
        for folder, manifest in manifests.items()
        if (manifest["recipe"]["agent"], _trained(manifest["recipe"]["roles"])) == wanted
    }
    if not created:
        having = f" with the roles {', '.join(roles)}" if roles else ""
        raise RunError(f"{runs_root()} has no run of the agent {agent!r}{having}; train one first")
    return max(created, key=lambda folder: created[folder])


def _trained(roles: Mapping[str, str]) -> dict[str, str | None]:
    """Each role, and the policy that it trains, if any."""
    return {role: policy_of(who) for role, who in roles.items()}


@contextmanager
def opened_run(name: str, recipe: dict[str, Any], fingerprint: str) -> Iterator[Path]:
    """The run's folder, made if it is new; while it is open no other process can open it."""
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _bind(folder / "manifest.json", recipe, fingerprint)
        yield folder


def folder_of(name: str) -> Path:
    """Where the run called `name` lies, or would; `evaluations/NAME` lies apart."""
    apart, _, last = name.rpartition("/")
    if last in ("", *APART) or last.startswith(".") or apart not in ("", *APART):
        raise RunError(f"{name!r} cannot name a run: use letters, digits, '-' and '_'")
    return runs_root() / name


def named(*parts: str) -> str:
    """A name for a run, of what may hold signs that a folder's should not, as an agent's may."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-.")


def policy_folder(folder: Path, name: str) -> Path:
    """Where a policy of the run in `folder` has its own files: the main one, in the run's."""
    return folder if name == POLICY else folder / POLICIES / name


def policy_names(folder: Path) -> list[str]:
    """The policies that the run in `folder` has begun to train, the main one first."""
    return [POLICY, *sorted(path.name for path in (folder / POLICIES).glob("*"))]


def exists(folder: Path) -> bool:
    """Whether a run was ever opened there."""
    return (folder / "manifest.json").exists()


def delete_run(folder: Path) -> None:
    """Remove a run that no process has open. What its forks share with it stays theirs."""
    with _locked(folder):
        aside = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
    shutil.rmtree(aside)


def recipe_of(folder: Path) -> dict[str, Any]:
    """The recipe a run is bound to."""
    return manifest_of(folder)["recipe"]


def recipe_at(folder: Path, step: int) -> dict[str, Any]:
    """The recipe that step `step` was made by: in a fork, its parent's where the parent made it."""
    described = manifest_of(folder)
    while (parent := described.get("parent")) and step < parent["step"]:
        described = parent
    return described["recipe"]


def manifest_of(folder: Path) -> dict[str, Any]:
    """What a run was started with; in a fork or a replay `parent` says of which run, and how."""
    if not exists(folder):
        raise RunError(f"there is no run at {folder}; `ratchet runs` lists those there are")
    return _read(folder / "manifest.json")


def write_manifest(
    folder: Path, recipe: dict[str, Any], fingerprint: str, parent: dict[str, Any] | None = None
) -> None:
    """Bind the folder to a recipe."""
    described = _describe(recipe, fingerprint) | ({"parent": parent} if parent else {})
    write_text(folder / "manifest.json", json.dumps(described, indent=2) + "\n")


def _bind(manifest: Path, recipe: dict[str, Any], fingerprint: str) -> None:
    if not manifest.exists():
        write_manifest(manifest.parent, recipe, fingerprint)
        return
    bound = _read(manifest)
    if bound["fingerprint"] != fingerprint:
        differing = ", ".join(differences(bound["recipe"], recipe))
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


def differences(old: object, new: object, path: str = "") -> list[str]:
    """What two recipes differ in, each as `section.key: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [
            difference
            for key in keys
            for difference in differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{path}: {old!r} → {new!r}"]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The kernel drops this lock when its process dies, however it dies."""
    with (folder / "lock").open("a+") as file:
        keep_from_children(file)
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
