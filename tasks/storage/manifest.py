"""The manifest of a run: the recipe and the format that its files are bound to, and its parent."""

import hashlib
import json
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from ratchet.adapters.door.roles import answerers, policy_of
from ratchet.adapters.errors import UserError, did_you_mean, listed
from ratchet.adapters.tinker.bases import read_origin
from ratchet.durable.files import sha256_of
from ratchet.tasks.storage.files import FileVersions, JsonRow, read_json, version_of, write_json
from ratchet.tasks.storage.logs import follow
from ratchet.tasks.storage.run_folder import RunError, RunFolder, all_runs, folder_of, runs_root

FORMAT = 11
"""Version of the run folder's layout and schemas."""


FORK, REPLAY = "fork", "replay"
"""Ways in which a run comes from its parent."""

COMPARED = "compared.parquet"
"""File of a comparison, in its folder, that has every example as each target played it."""

RECORDED_VERSIONS = ("ratchet-rl", "tinker", "torch", "transformers", "renderers", "prefect")

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

Manifest = dict[str, Any]
"""created, format, recipe, fingerprint, versions, python, machine; files: the checksums of its data
and of the project's code; commit: Git's commit of the folder in which it was begun, if it is in
one; if its base is a GGUF file, base_origin, with licence and author; if it names checkpoints of
other runs, bound: what each was; in a fork or a replay also parent: run, step, how, fingerprint,
recipe and, if it has one, its parent."""

log = logging.getLogger(__name__)


@contextmanager
def bind_run(
    name: str,
    recipe: dict[str, Any],
    fingerprint: str,
    further: Manifest | None = None,
    check: Callable[[RunFolder], object] = lambda _: None,
    *,
    to_serve: bool = False,
) -> Iterator[RunFolder]:
    """Yield the locked folder of a run, made with `further` keys of its manifest if it is new.

    Raises RunError if the run was written in another format, or is a copy of a run that is open. A
    `check` that raises leaves the run to its owner.
    """
    run = folder_of(name)
    with run.locked(to_serve=to_serve), run.stored() as put:
        run.sweep()
        if not run.exists():
            write_manifest(run, recipe, fingerprint, further)
        read_manifest(run)
        check(run)
        owned = run.take_over()
        put()
        yield owned


def read_manifest(run: RunFolder) -> Manifest:
    """Read the manifest; RunError if there is no run or if its format is not FORMAT."""
    if not run.exists():
        near = did_you_mean(run.name, (other.name for other in all_runs()))
        raise RunError(f"there is no run at {run.path}; `ratchet runs` lists those there are{near}")
    manifest = read_json(run.manifest)
    if manifest["format"] != FORMAT:
        raise RunError(
            f"the run {run.path} was written in format {manifest['format']}, and this version "
            f"reads format {FORMAT}; continue it with the version that wrote it, or train a new run"
        )
    return manifest


def write_manifest(
    run: RunFolder, recipe: dict[str, Any], fingerprint: str, further: Manifest | None = None
) -> None:
    """Bind the folder to a recipe and to FORMAT, and to what `further` keys have."""
    origin = read_origin(recipe.get("model", {}).get("base", ""))
    described = {
        "created": datetime.now(UTC).isoformat(),
        "format": FORMAT,
        "recipe": recipe,
        "fingerprint": fingerprint,
        "versions": {name: version(name) for name in RECORDED_VERSIONS},
        "python": platform.python_version(),
        "machine": platform.machine(),
        **({"base_origin": origin} if origin else {}),
        **({"commit": commit} if (commit := _commit()) else {}),
        **{key: value for key, value in (further or {}).items() if value},
    }
    write_json(run.manifest, described)


def _commit() -> str:
    """Name the Git commit of the working folder, if any, and whether its files differ from it."""
    if (git := shutil.which("git")) is None:
        return ""
    words = (git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= and changes")
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def readable_runs() -> list[RunFolder]:
    """List the runs that can be read, by name; a warning names every other run."""
    readable: list[RunFolder] = []
    for run in all_runs():
        try:
            read_manifest(run)
            readable.append(run)
        except UserError as error:
            log.warning("%s", error)
    return readable


def compared_files() -> list[Path]:
    return sorted(runs_root("comparisons").glob(f"comparisons/*/{COMPARED}"))


def recipe_of(run: RunFolder) -> dict[str, Any]:
    return read_manifest(run)["recipe"]


def parent_of(run: RunFolder) -> Manifest | None:
    """Return the parent of a fork or a replay, None of any other run."""
    return read_manifest(run).get("parent")


def describe_parent(manifest: Manifest) -> str:
    """Name the checkpoint that a run forks or starts from, or the run that a replay trains on."""
    if (parent := manifest.get("parent")) is None:
        return manifest["recipe"].get("model", {}).get("start") or ""
    return f"{parent['run']}@{parent['step']}" if parent["how"] == FORK else parent["run"]


@dataclass(frozen=True)
class ByStep(Generic[T]):
    """Values of a run's steps: `begun` has the first step of each value, in order.

    A step has the last value that begins at or before it: of ((0, "a"), (4, "b")), steps 0 to 3
    have "a". The steps that a fork shares with its parent have the parent's value.
    """

    begun: tuple[tuple[int, T], ...]

    def at(self, step: int) -> T:
        return next(value for first, value in reversed(self.begun) if first <= step)

    def make(self, kind: type[K], made_of: Callable[[K], V]) -> "ByStep[V]":
        """Apply a function to the values of a class; leave the others out."""
        own = ((first, value) for first, value in self.begun if isinstance(value, kind))
        return ByStep(tuple((first, made_of(value)) for first, value in own))


def lineage(run: RunFolder) -> list[tuple[int, dict[str, Any]]]:
    """List (step, recipe): a step was made by the last entry that begins at or before the step.

    The steps that a fork shares with its parent were made by the parent's recipe.
    """
    first, *later = reversed(generations(read_manifest(run)))
    eras = [(parent["step"], child["recipe"]) for parent, child in pairwise([first, *later])]
    return [(0, first["recipe"]), *eras]


def ancestors(run: RunFolder) -> list[str]:
    """List the runs that a fork or a replay descends from, the nearest first, by their names."""
    return [parent["run"] for parent in generations(read_manifest(run))[1:]]


def generations(manifest: Manifest) -> list[Manifest]:
    """List a manifest, what it tells of the run's parent, what that tells of its own, and on."""
    found = [manifest]
    while parent := found[-1].get("parent"):
        found.append(parent)
    return found


def latest_run(agent: str, roles: Mapping[str, str]) -> RunFolder:
    """Return the newest run, in FORMAT, of an agent whose roles train the same policies."""
    created: dict[str, RunFolder] = {}
    for run in all_runs():
        try:
            manifest = read_manifest(run)
        except UserError:
            continue
        recipe = manifest["recipe"]
        if recipe.get("agent") == agent and _trained(answerers(recipe["roles"])) == _trained(roles):
            created[manifest["created"]] = run
    if not created:
        having = f" with the roles {', '.join(roles)}" if roles else ""
        raise RunError(
            f"{runs_root()} has no run of the agent {agent!r}{having}; evaluate the untrained "
            "model by --model base, or train one first"
        )
    return created[max(created)]


def differences(old: object, new: object, path: str = "") -> list[str]:
    """List what two recipes differ in, each as `section.key: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [
            difference
            for key in keys
            for difference in differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{path}: {_written(old)} → {_written(new)}"]


def _written(value: object) -> str:
    """Write a value of a recipe: a text as Python quotes it, anything else as JSON."""
    return repr(value) if isinstance(value, str) else json.dumps(value)


def checksum(paths: Sequence[Path]) -> str:
    """Hash a file, or the names and the hashes of several, and of those below folders."""
    if len(paths) == 1 and not paths[0].is_dir():
        return _sha256(paths[0], version_of(paths))
    files = [(root, file) for root in paths for file in sorted([root, *root.rglob("*")])]
    lines = [
        f"{_sha256(file, version_of([file]))}  {file.relative_to(root) if file != root else ''}\n"
        for root, file in files
        if file.is_file()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@lru_cache(100_000)
def _sha256(file: Path, _: FileVersions) -> str:
    return sha256_of(file) or "unreadable"


def file_rows(run: RunFolder) -> list[JsonRow]:
    """List since which step a run is made of which files, by their checksums."""
    made = {"step": 0, "files": read_manifest(run).get("files", {})}
    rows = follow(run.work, list[JsonRow]).ask(list[JsonRow])
    return [made, *(row for row in rows if "files" in row)]


def changed_files(run: RunFolder, sums: Mapping[str, str]) -> dict[str, str]:
    """Return those of some files, by their checksums, that are not as the run has had them last."""
    known = {name: sum for row in file_rows(run) for name, sum in row["files"].items()}
    return {name: sum for name, sum in sums.items() if known.get(name, sum) != sum}


def refuse_changed(run: RunFolder, sums: Mapping[str, str]) -> None:
    """Refuse (RunError) files that have changed since the run has had them."""
    if changed := changed_files(run, sums):
        raise RunError(
            f"the run {run.path} was made with other contents of {listed(changed)}; put them back, "
            f"or give `ratchet resume {run.name} --changed` to go on with what is there now"
        )


def record_files(run: RunFolder, sums: Mapping[str, str], step: int) -> None:
    """Record the files with which a run goes on from a step, as far as they are new to it."""
    known = {name: sum for row in file_rows(run) for name, sum in row["files"].items()}
    if new := sorted(sums.items() - known.items()):
        follow(run.work, list[JsonRow]).append({"files": dict(new), "step": step})


def list_changes(run: RunFolder) -> list[str]:
    """Say after which steps which files have had other contents than before."""
    known, said = dict[str, str](), list[str]()
    for row in file_rows(run):
        files = row["files"]
        if others := [name for name in files if known.get(name, files[name]) != files[name]]:
            said.append(f"other contents of {listed(others)} after step {row['step']}")
        known |= files
    return said


def _trained(roles: Mapping[str, str]) -> dict[str, str | None]:
    """Map each role to the policy that it trains, if any."""
    return {role: policy_of(who) for role, who in roles.items()}
