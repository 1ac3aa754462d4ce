"""A run in an object store: its files under their checksums, and an index that names them.

A run is played and read in a folder of this machine, which is a copy of what the store has. Objects
never change but the index, which is replaced only if it is what this process has put or read last.
So the indices of a run are one history, and a process whose run another machine has taken over can
put nothing more.
"""

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from hashlib import sha256
from math import inf
from pathlib import Path, PurePosixPath
from secrets import token_hex
from threading import Event, Lock, Thread
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, StringConstraints

from ratchet.adapters.network.bucket import Bucket, Conflict, StoreError, Version, open_bucket
from ratchet.durable.files import PARTIAL, lock_file
from ratchet.tasks.storage.files import version_of, write_bytes

SYNCED, OWN_ID, FETCHING = ".store.json", ".owner", ".fetching"
"""Files of this machine alone: what a run's folder has of its index; who owns here; a lock."""
LOCAL = ("lock", "report.html", "places", "tracking", "wandb", "engine/lock", "engine/engine.log")
"""Files and folders of a run that are not put into a store."""
AT_ONCE = 16
LOOK_SECONDS = 5.0
"""Time in which a reader does not ask for an index again."""
EVERY = "RATCHET_STORE_SECONDS"

T = TypeVar("T")

log = logging.getLogger(__name__)


def _below(path: str) -> str:
    if any(one.startswith(".") or not one for one in path.split("/")):
        raise ValueError(f"{path!r} is not the path of a file in a run's folder")
    return path


Part = tuple[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")], int]
"""Object with some bytes of a file: their checksum, and how many they are."""
Stat = tuple[int, int]
"""Time of a file's last change, and its size."""
Held = Callable[[Path], bool]
"""Returns whether a process of this machine has the run of a folder open."""


class Index(BaseModel, frozen=True):
    """Files of a run, each by its parts in order; without a file there is no run.

    `owner` is the copy whose process has put this, `id` makes it unlike any other index, and `open`
    says that the process goes on.
    """

    id: str = ""
    owner: str = ""
    process: str = ""
    open: bool = False
    files: dict[Annotated[str, AfterValidator(_below)], list[Part]] = {}


class Synced(BaseModel):
    """Index that a folder was last equal to, by its tag, and the files that it has from there."""

    tag: str = ""
    files: dict[str, tuple[list[Part], Stat]] = {}


class Mirror:
    """The copy of a run on this machine, and what of it is in the store."""

    def __init__(self, folder: Path, root: Path, bucket: Bucket) -> None:
        self.folder = folder
        self.index = Index()
        self._bucket = bucket
        self._own_id = _own_id(root)
        self._key = f"runs/{folder.relative_to(root).as_posix()}.json"
        self._version: Version | None = None
        self._synced = Synced()
        self._apart = set[str]()
        """Files of the index that are not brought here, and stay in it."""
        self._owns = False
        self._next: Future[None] | None = None
        self._closing = Event()
        self._lock = Lock()
        self._pushing = ThreadPoolExecutor(1, "store")

    @property
    def is_elsewhere(self) -> bool:
        """Whether another copy's process has the run open, or ended without a word."""
        return self.index.open and self.index.owner != self._own_id

    def fetch(self, *, whole: bool, known: str | None = None) -> None:
        """Bring the folder to what the store has; the engine's files only if `whole`.

        A folder that has gone on from the store's index is left as it is. An index with the tag
        that is `known` is not read.
        """
        if (file := self.folder / SYNCED).exists():
            self._synced = Synced.model_validate_json(file.read_bytes())
        if known is not None and known == self._synced.tag:
            return
        if version := self.look():
            self._bring(version.get("e_tag", ""), whole)
        elif self._synced.tag:
            raise StoreError(
                f"{self._bucket.address}/{self._key} is gone, and {self.folder} is a copy of it; "
                "put it back, or remove that folder"
            )

    def look(self) -> Version | None:
        """Read the store's index; return its version, None if there is none."""
        if found := self._bucket.get(self._key):
            self.index, self._version = _read_index(found[0], self._key), found[1]
        return self._version

    def sizes(self, below: str) -> dict[str, int]:
        """Map the files in the index that are below a folder to their bytes."""
        files = {path: of for path, of in self.index.files.items() if path.startswith(below)}
        return {path: sum(size for _, size in parts) for path, parts in files.items()}

    def _bring(self, tag: str, whole: bool) -> None:
        """Make the folder what the index says, unless it has gone on from it, or is newer."""
        had, is_wanted = self._synced, lambda path: whole or not path.startswith("engine/")
        if not (self.index.files or had.tag):
            return
        ours = had.tag != "" and (had.tag == tag or self.index.owner == self._own_id)
        wanted = {path: parts for path, parts in self.index.files.items() if is_wanted(path)}
        self._apart = self.index.files.keys() - wanted
        missing = {
            path: parts for path, parts in wanted.items() if not self._has(path, parts, ours)
        }
        for path in () if ours else filter(is_wanted, list_files(self.folder).keys() - wanted):
            (self.folder / path).unlink(missing_ok=True)
        _in_parallel(partial(self._download, path, parts) for path, parts in missing.items())
        os.sync()  # what is put later is what was written here, even after a power cut
        kept = {path: one for path, one in had.files.items() if ours or path in wanted}
        stats = dict(zip(missing, version_of(self.folder / path for path in missing), strict=True))
        brought = {path: (missing[path], stat) for path, stat in stats.items() if stat}
        self._write_synced(Synced(tag=tag, files=kept | brought))

    def _has(self, path: str, parts: list[Part], ours: bool) -> bool:
        """Return whether a file is as the index has it or, in a folder of ours, newer."""
        [stat] = version_of([self.folder / path])
        had = self._synced.files.get(path)
        return (ours and (had or stat) is not None) or had == (parts, stat)

    def _download(self, path: str, parts: list[Part]) -> None:
        """Write a file of its parts, each checked."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}{PARTIAL}")
        with aside.open("wb") as file:
            for digest, _ in parts:
                found = self._bucket.get(f"objects/{digest}")
                if found is None or sha256(found[0]).hexdigest() != digest:
                    raise StoreError(
                        f"{self._bucket.address}/objects/{digest}, a part of {path} of the run "
                        f"{self.folder.name}, is {'damaged' if found else 'gone'}; put it back "
                        "from a copy"
                    )
                file.write(found[0])
        aside.replace(target)

    def open(self) -> None:
        """Have `flush` put what is new, also each so many seconds if that is set."""
        self._bucket = replace(self._bucket, patience=inf, leaving=Event())
        if seconds := _every():
            Thread(target=self._flush_every, args=[seconds], daemon=True).start()

    def flush(self) -> None:
        """Wait until the store has all that is in the folder now, and that this process owns it.

        Conflict if another process has taken over the run. Calls that wait share a push.
        """
        with self._lock:
            if self._next is None:
                self._next = self._pushing.submit(self._push)
            pushed = self._next
        pushed.result()

    def forget(self, paths: Iterable[str]) -> None:
        """Have the next index lack files that are removed here."""
        self._apart.difference_update(paths)

    def close(self, ended: bool) -> None:
        """Let go of the run if this process owns it; wait for the store only if all has `ended`."""
        self._closing.set()
        if not ended:
            self._bucket.leaving.set()
        self._pushing.shutdown()
        try:
            if self._owns:
                self._push(is_open=False)
        except StoreError as error:
            if ended:
                raise
            log.warning("%s. What is not there yet stays in %s", error, self.folder)

    def _flush_every(self, seconds: float) -> None:
        while not self._closing.wait(seconds):
            with suppress(StoreError, RuntimeError):  # the next `flush` says it; it has just closed
                self.flush()

    def _push(self, *, is_open: bool = True) -> None:
        with self._lock:
            self._next = None
        found, synced = snapshot(self.folder), self._synced.files
        same = {p: synced[p] for p, stat in found.items() if p in synced and synced[p][1] == stat}
        new = [partial(self._upload, path, found[path]) for path in found if path not in same]
        put = {path: (parts, found[path]) for path, parts in _in_parallel(new) if parts}
        files = dict(sorted((same | put).items()))
        apart = self._apart if self.folder.exists() else ()  # a run that is deleted has nothing
        known = {path: self.index.files[path] for path in apart if path not in files}
        index = Index(
            id=token_hex(8),
            owner=self._own_id,
            process=f"process {os.getpid()} on {socket.gethostname()}",
            open=is_open,
            files=known | {path: parts for path, (parts, _) in files.items()},
        )
        data = index.model_dump_json().encode()
        try:
            self._version = self._bucket.replace(self._key, data, self._version)
        except Conflict:
            self._owns = False
            found = self._bucket.get(self._key)
            by = _read_index(found[0], self._key).process if found else "nobody that it names"
            raise Conflict(
                f"the run {self.folder.name} of {self._bucket.address} was taken over by {by}: "
                f"this process ({os.getpid()}) puts nothing more there. Let that one go on, or end "
                "it and resume the run"
            ) from None
        self.index, self._owns = index, True
        self._write_synced(Synced(tag=self._version.get("e_tag", ""), files=files))

    def _upload(self, path: str, stat: Stat) -> tuple[str, list[Part]]:
        """Put what is new of a file, and return its parts; none if the file is gone.

        What was appended to a file is a part of its own, in which smaller last parts are put anew,
        so that a file of n lines has a number of parts that grows by the logarithm.
        """
        parts, end = list[Part](), 0
        try:
            with (self.folder / path).open("rb") as file:
                data = file.read(stat[1]) if path.endswith(".jsonl") else file.read()
        except FileNotFoundError:
            return path, parts
        for digest, size in self._synced.files.get(path, ([],))[0]:
            if sha256(data[end : end + size]).hexdigest() != digest:
                break
            parts.append((digest, size))
            end += size
        while parts and end < len(data) and parts[-1][1] <= len(data) - end:
            end -= parts.pop()[1]
        if end < len(data) or not parts:
            digest = sha256(data[end:]).hexdigest()
            self._bucket.add(f"objects/{digest}", data[end:])
            parts.append((digest, len(data) - end))
        return path, parts

    def _write_synced(self, synced: Synced) -> None:
        self._synced = synced
        if self.folder.exists():  # a run that is deleted has none
            write_bytes(self.folder / SYNCED, synced.model_dump_json().encode())


open_runs: dict[Path, Mirror] = {}
"""Runs that this process has open, by their folders."""


@contextmanager
def kept(folder: Path, root: Path, address: str, *, whole: bool) -> Iterator[Callable[[], None]]:
    """Bring a run here, and yield what makes this process its owner and puts what is new."""
    with _fetching(root):
        mirror = Mirror(folder, root, _bucket(address))
        mirror.fetch(whole=whole)
    mirror.open()
    open_runs[folder], ended = mirror, False
    try:
        yield mirror.flush
        ended = True
    finally:
        del open_runs[folder]
        mirror.close(ended)


def fetch(folder: Path, root: Path, address: str, held: Held, *, whole: bool) -> None:
    """Bring a run here for a reader, unless a process has it open or that was done just now."""
    if folder not in open_runs:
        _fetch(folder, root, address, held, whole, time.monotonic() // LOOK_SECONDS)


def look_at(folder: Path, root: Path, address: str) -> Mirror:
    """Return a copy of a run with the store's index, of whose files none is brought here."""
    mirror = Mirror(folder, root, _bucket(address))
    mirror.look()
    return mirror


def remove_unnamed(address: str) -> tuple[int, int]:
    """Remove the objects that no index names, but those put lately; count them and their bytes."""
    bucket = _bucket(address)

    def named_by(key: str) -> set[str]:
        found = bucket.get(key)
        files = _read_index(found[0], key).files if found else {}
        return {f"objects/{digest}" for parts in files.values() for digest, _ in parts}

    objects = bucket.sizes("objects")
    indices = _in_parallel(partial(named_by, key) for key in bucket.sizes("runs"))
    left = sorted(objects.keys() - set[str]().union(*indices))
    removed = _in_parallel(partial(bucket.remove_old, key) for key in left)
    sizes = [objects[key] for key, gone in zip(left, removed, strict=True) if gone]
    return len(sizes), sum(sizes)


def fetch_all(root: Path, address: str, held: Held, below: str = "") -> None:
    """Bring every run here that has changed, and that no process of this machine has open."""
    _fetch_all(root, address, held, below, time.monotonic() // LOOK_SECONDS)


@lru_cache
def _fetch(folder: Path, root: Path, address: str, held: Held, whole: bool, _: float) -> None:
    if held(folder):
        return
    with _fetching(root):
        Mirror(folder, root, _bucket(address)).fetch(whole=whole)
        _clear(folder)


@lru_cache
def _fetch_all(root: Path, address: str, held: Held, below: str, _: float) -> None:
    with _fetching(root):
        for key, tag in _bucket(address).list(f"runs/{below}".rstrip("/")).items():
            folder = root / _below(key.removeprefix("runs/")).removesuffix(".json")
            if folder not in open_runs and not held(folder):
                Mirror(folder, root, _bucket(address)).fetch(whole=False, known=tag)
                _clear(folder)


def _clear(folder: Path) -> None:
    """Remove what is left here of a run that was deleted elsewhere."""
    if (folder / SYNCED).exists() and not list_files(folder):
        shutil.rmtree(folder, ignore_errors=True)


def snapshot(folder: Path) -> dict[str, Stat]:
    """List the files of a run so that all is there of which a listed file is made.

    Of two listings with the same names, whatever one has seen was made of what the other one has,
    and so were the lines that a log had at the time of the earlier one.
    """
    found = dict[str, Stat]()
    while (later := list_files(folder)).keys() != found.keys():
        found = later
    sealed = {PurePosixPath(path).stem for path in found if path.startswith("spans/")}
    if _every():
        return found
    begun = {p for p in found if p.startswith("journal/") and PurePosixPath(p).stem not in sealed}
    return {path: stat for path, stat in found.items() if path not in begun}


def list_files(folder: Path) -> dict[str, Stat]:
    """List the files of a run's folder that a store has, by their paths there."""
    found, below = dict[str, Stat](), [""]
    alone = folder.name == "comparisons"  # whose folders are runs of their own
    for prefix in below:
        for entry in _entries(f"{folder}/{prefix}"):
            path = f"{prefix}{entry.name}"
            if entry.name.startswith(".") or path in LOCAL:
                continue
            if entry.is_dir():
                below += [] if alone else [f"{path}/"]
                continue
            with suppress(FileNotFoundError):
                found[path] = (stat := entry.stat()).st_mtime_ns, stat.st_size
    return found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """List what is in a folder; nothing if it is gone, since the engine removes folders, too."""
    with suppress(FileNotFoundError):
        return [*os.scandir(folder)]
    return []


def _every() -> float:
    """Return each how many seconds batches that are being played are put, too; 0 for never."""
    said = os.environ.get(EVERY) or "0"
    try:
        return float(said)
    except ValueError:
        raise StoreError(f"{EVERY}={said} is no number of seconds; give one, or unset it") from None


def _read_index(data: bytes, key: str) -> Index:
    try:
        return Index.model_validate_json(data)
    except ValueError:
        raise StoreError(f"{key} is not the index of a run; restore it from a copy") from None


def _in_parallel(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Return what calls return, AT_ONCE at a time; raise the error of the first that failed."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


@cache
def _bucket(address: str) -> Bucket:
    return open_bucket(address)


@cache
def _own_id(root: Path) -> str:
    """Return the name of this machine's copy, which a copy of its folder does not share."""
    if not (path := root / OWN_ID).exists():
        write_bytes(path, token_hex(8).encode())
    return f"{socket.gethostname()}:{root}:{path.read_text()}"


@contextmanager
def _fetching(root: Path) -> Iterator[None]:
    """Let one process at a time bring files into a copy."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / FETCHING).open("w") as file:
        lock_file(file, wait=True)
        yield
