"""A run on disk: where each of its files lies, and the lock that gives it one process at a time."""

import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.network.addresses import ENDPOINTS
from ratchet.adapters.process.child import keep_from_children
from ratchet.adapters.tinker.known_models import user_cache
from ratchet.durable.files import PARTIAL, link_or_copy, lock_file
from ratchet.durable.process import working_folder
from ratchet.tasks.storage.files import (
    Damaged,
    is_written,
    read_json,
    read_rows,
    write_json,
    write_note,
)
from ratchet.tasks.storage.logs import read_log
from ratchet.tasks.storage.names import HELD_OUT_SPLITS, JUDGE, batch_name, parse_batch, shard_name
from ratchet.tasks.storage.owners import Ownership, last_owner, take_over
from ratchet.tasks.storage.stages import STAGE, STAGES, StageFiles

RUNS = "RATCHET_RUNS"

UNTRAINED_FOLDERS = ("evaluations", "dryruns", "comparisons")
"""Folders of runs that train nothing; the newest run of an agent is never one of them."""

FOLDERS = ("policies", *(stage.name for stage in STAGES if stage.per != "run"))
"""Folders of a run whose files all carry checksums."""

UNSEALED = ("lock", "report.html", "games", "engine", "places", "tracking", "wandb")
"""Files and folders of a run that carry no checksum: what is made for people and for others, what
programs have made, and the engine's own, which seals its files itself."""

TRAINED_SPLITS = ("train", JUDGE)
"""Splits whose rollouts are trained on, or are needed to compute advantages."""

log = logging.getLogger(__name__)


class RunError(UserError):
    """Refusal to open or change a run as it was asked."""


RUN_NAME = re.compile(
    rf"(?:(?:{'|'.join(UNTRAINED_FOLDERS)})/)?(?P<last>[A-Za-z0-9_][A-Za-z0-9_.-]*)"
)
SERVES = "which serves it"
HOLDER = re.compile(rf"process (?P<process>\d{{1,9}}) on (?P<host>[^,]+)(?P<serves>, {SERVES})?")
"""Text in the lock of an open run: the process that holds it, and whether it serves."""

LONGEST_RUN_NAME = 200
"""Letters of a run's name: file systems allow 255, and files beside a run have longer names."""


class FileAt:
    """A file or a folder of a run, by its path in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", _: type | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run, with the path of every file in it.

    The main policy's files lie in the folder itself; any other policy has a folder of the same
    shape in `policies/<its name>`.
    """

    path: Path
    ownership: Ownership | None = field(default=None, compare=False, repr=False)
    """Ownership of this process, if it has opened the run."""

    manifest = FileAt("manifest.json")
    """Recipe, format and parent that the run is bound to."""
    texts = FileAt("texts.parquet")
    """Tokens of the texts that a run learns, if it learns texts."""
    expert_texts = FileAt("expert_texts.parquet")
    """Tokens of an expert's texts, if a run trains some beside its rollouts."""
    pairs = FileAt("pairs.parquet")
    """Tokens of the pairs that a run learns from, if it learns from preferences."""
    pair_references = FileAt("pair_references.parquet")
    """The reference's log-probabilities of those tokens."""
    reference_parts = FileAt("reference_parts")
    """Folder of parts of that file, until all of them are there."""
    owners = FileAt("owners.jsonl")
    """Log of the processes that have had the run open."""
    metrics = FileAt("metrics.jsonl")
    """Metrics, one line for each finished step."""
    work = FileAt("work.jsonl")
    """Log of what the run has asked its service for, beside the calls of its agents."""
    service = FileAt("service.json")
    """What the run's service was found to offer, if it is not an engine of the run's own."""
    end = FileAt("end.json")
    """Record of the step after which a run ends early, and why; only there if it does."""
    stages = FileAt("stages.json")
    """Record of a run of several runs: stages, or the runs of a sweep."""
    report = FileAt("report.html")
    """Page for people, made of the other files; nothing reads it."""
    engine = FileAt("engine")
    """State of the run's own engine."""
    places = FileAt("places")
    """Places of rollouts: those that are being played, and those that are kept."""
    tracking = FileAt("tracking")
    """Files of the trackers of experiments; nothing of a run's reads them."""

    @property
    def name(self) -> str:
        return self.path.name

    def shard(self, shard: str) -> Path:
        return self.path / "shards" / f"{shard}.jsonl"

    def journal(self, batch: str) -> Path:
        return self.path / "journal" / f"{batch}.jsonl"

    def spans(self, batch: str) -> Path:
        return self.path / "spans" / f"{batch}.parquet"

    def file_of(self, stage: StageFiles, policy: str, step: int = 0) -> Path:
        """Return the file of a stage that has one, or one a step."""
        path = (self._of(policy) if stage.per_policy else self.path) / stage.name
        return path if stage.per == "run" else path / f"{step:05d}{stage.ending}"

    def trajectories(self, policy: str, step: int) -> Path:
        return self.file_of(STAGE["trajectories"], policy, step)

    def references(self, policy: str, step: int, source: str = "references") -> Path:
        """Return the file of a step's log-probabilities under the reference, or the teachers."""
        return self.file_of(STAGE[source], policy, step)

    def rewards(self, policy: str, step: int) -> Path:
        return self.file_of(STAGE["rewards"], policy, step)

    def verdicts(self, step: int) -> Path:
        """Return the file of a judge's scores of a step's rollouts, which all policies share."""
        return self.file_of(STAGE["verdicts"], POLICY, step)

    def datums(self, policy: str, step: int) -> Path:
        return self.file_of(STAGE["datums"], policy, step)

    def expert(self, policy: str, step: int) -> Path:
        """Return the file of an expert's datums, trained beside the rollouts' datums."""
        return self.file_of(STAGE["expert"], policy, step)

    def update(self, policy: str, step: int) -> Path:
        return self.file_of(STAGE["updates"], policy, step)

    def checkpoints(self, policy: str) -> Path:
        return self._of(policy) / "checkpoints.jsonl"

    def record_end(self, step: int, why: str) -> None:
        """Record that the run has so many steps, fewer than its recipe says, and why."""
        self.check_owner()
        write_json(self.end, {"step": step, "why": why})

    def steps_of(self, steps: int) -> int:
        """Return how many steps the run has when it is finished, of the `steps` of its recipe."""
        return read_json(self.end)["step"] if is_written(self.end) else steps

    def why_ended(self) -> str:
        """Say why the run ends early; empty if it does not."""
        return read_json(self.end)["why"] if is_written(self.end) else ""

    def evaluation(self, name: str) -> Path:
        return self.path / "evaluations" / f"{name}.json"

    def measure(self, step: int) -> Path:
        """Return the file of a checkpoint's measure on held-out texts or pairs."""
        return self.path / "measures" / f"{step:05d}.json"

    def games(self, shard: str) -> Path:
        """Return the file of the rollouts of an evaluated shard, one a line."""
        return self.path / "games" / f"{shard}.jsonl"

    def text_teacher(self, part: int) -> Path:
        """Return the file of what a teacher finds likeliest in a part of the trained texts."""
        return self.path / "text_teachers" / f"{part:05d}.parquet"

    def kept_place(self, rollout: str) -> Path | None:
        return next((place for place in self.kept_places() if place.name == rollout), None)

    def kept_places(self) -> list[Path]:
        """List the places of rollouts that are kept; those in a run that is open are in use."""
        return [path for path in sorted(self.places.glob("[!.]*")) if path.is_dir()]

    def exists(self) -> bool:
        """Return whether a run was ever opened here."""
        return self.manifest.exists()

    def policies(self) -> list[str]:
        """List the policies that the run has begun to train, the main one first."""
        return [POLICY, *sorted(path.name for path in (self.path / "policies").glob("*"))]

    def journalled(self, shard: str) -> list[str]:
        """List the batches of a shard that were begun, by their journals, in order."""
        return self._batches(shard, self.journal)

    def batches_of(self, step: int) -> list[str]:
        return self.journalled(shard_name("train", step))

    def sealed(self, shard: str) -> list[Path]:
        """List the sealed Parquet files of a shard's batches, in order."""
        return [self.spans(batch) for batch in self._batches(shard, self.spans)]

    def all_spans(self) -> tuple[list[Path], list[Path]]:
        """List every sealed Parquet file of the run, and the journals of batches without one."""
        sealed, begun = self.sealed_batches(), self.begun_batches()
        journals = [self.journal(batch) for batch in sorted(begun - sealed)]
        return [self.spans(batch) for batch in sorted(sealed)], journals

    def begun_batches(self) -> set[str]:
        return _stems(self.journal("any"))

    def sealed_batches(self) -> set[str]:
        """Return the names of all batches that have a Parquet file."""
        return _stems(self.spans("any"))

    def batch_files(self, batches: Iterable[str]) -> list[Path]:
        """List the files of batches, each once: shards, journals and Parquet files."""
        found: dict[Path, None] = {}
        for batch in batches:
            shard = self.shard(parse_batch(batch).shard)
            found |= dict.fromkeys([shard, self.journal(batch), self.spans(batch)])
        return [*filter(Path.exists, found)]

    def shards_of(self, batches: Iterable[str]) -> list[Path]:
        """List the files of the shards of batches, each once."""
        shards = dict.fromkeys(self.shard(parse_batch(batch).shard) for batch in batches)
        return [path for path in shards if path.exists()]

    def set_aside(self, batch: str) -> None:
        """Put the journal of a batch into `stopped`, so that the batch is played anew."""
        self.reopen(batch)
        self.journal(batch).unlink()

    def reopen(self, batch: str) -> None:
        """Share the journal of a batch with `stopped`, and remove the Parquet file.

        A batch that has a Parquet file counts as played. The journal can then lose lines.
        """
        aside = self.path / "stopped"
        earlier = len([*aside.glob(f"{batch}.*.jsonl")])
        link_or_copy(self.journal(batch), aside / f"{batch}.{earlier}.jsonl")
        self.spans(batch).unlink(missing_ok=True)

    def withdraw(self, shard: str) -> None:
        """Set aside the batches of a shard, and remove its file, so that it is drawn anew."""
        for batch in self.journalled(shard):
            self.set_aside(batch)
        self.shard(shard).unlink(missing_ok=True)

    def forget_evaluation(self, step: int, tag: str = "") -> None:
        """Remove the scores and the games of an evaluation, which is then scored anew."""
        self.evaluation(f"{step:05d}{tag}").unlink(missing_ok=True)
        for split in HELD_OUT_SPLITS:
            self.games(shard_name(f"{split}{tag}", step)).unlink(missing_ok=True)

    def held_out(self, step: int) -> list[str]:
        """List the sealed batches of held-out examples that checkpoint `step` has played."""
        batches = map(parse_batch, sorted(self.sealed_batches()))
        own = [one for one in batches if one.step == step and one.split not in TRAINED_SPLITS]
        own.sort(key=lambda one: one.number)
        return [batch_name(one.shard, one.number) for one in own]

    def learning_files(self, step: int) -> list[Path]:
        """List what the policies made of the rollouts of a step: trajectories to updates."""
        stages = [stage for stage in STAGES if stage.per == "step"]
        paths = (self.file_of(one, policy, step) for policy in self.policies() for one in stages)
        return [path for path in dict.fromkeys(paths) if path.exists()]

    def evaluations(self, checkpoint: str = "") -> list[Path]:
        """List the scores of every evaluation, or of a checkpoint's evaluations, in their order."""
        return sorted((self.path / "evaluations").glob(f"{checkpoint}*.json"))

    def measures(self) -> list[Path]:
        """List the measures on held-out texts or pairs, by checkpoint."""
        return sorted((self.path / "measures").glob("*.json"))

    def given_files(self) -> list[Path]:
        """List the files of the texts or pairs that the run learns; [] if it plays rollouts."""
        taught = sorted((self.path / "text_teachers").glob("*.parquet"))
        given = (self.texts, *taught, self.pairs, self.pair_references)
        return [path for path in given if path.exists()]

    def list_files(self, folder: str, ending: str) -> list[Path]:
        """List the files of a folder of the run that end so, by their names."""
        return sorted((self.path / folder).glob(f"*.{ending}"))

    def bound_files(self) -> list[Path]:
        """List the files of all that the run learns and has not played, with an expert's texts."""
        return [*self.given_files(), *filter(Path.exists, [self.expert_texts])]

    def learned(self, policy: str, stage: str) -> list[Path]:
        """List the Parquet files of a stage of a policy, by step."""
        return sorted((self._of(policy) / stage).glob("*.parquet"))

    def shards(self) -> list[Path]:
        """List the shards of every split, by name."""
        return sorted((self.path / "shards").glob("*.jsonl"))

    def updated(self, policy: str) -> list[int]:
        """List the steps whose update of a policy is made, in no special order."""
        return [int(path.stem) for path in (self._of(policy) / "updates").glob("*.json")]

    def files(self) -> list[Path]:
        """List the files of the run itself, and anything in the place of one.

        Hidden files are being written; UNSEALED files carry no checksum. Both are left out.
        """
        found: list[Path] = []
        folders = [self.path]
        for folder in folders:
            for path in folder.iterdir():
                if path.name.startswith(".") or path.relative_to(self.path).parts[0] in UNSEALED:
                    continue
                kept = path.name in FOLDERS or folder.name == "policies"
                (folders if kept and path.is_dir() else found).append(path)
        return sorted(found)

    def fetched(self, *, whole: bool = False) -> "RunFolder":
        """Return the folder once a store's files are there; an engine's weights only if `whole`."""
        if address := store_address():
            _mirrors().fetch(self.path, runs_root(), address, _is_held, whole=whole)
        return self

    @contextmanager
    def stored(self, *, whole: bool = True) -> Iterator[Callable[[], None]]:
        """Bring the run here; yield what has an object store know its owner, and what is new."""
        if not (address := store_address()):
            yield lambda: None
            return
        with _mirrors().kept(self.path, runs_root(), address, whole=whole) as put:
            yield put

    def put(self) -> None:
        """Wait until the object store of an open run, if there is one, has all that is here."""
        if mirror := self._mirror():
            mirror.flush()

    def refuse_elsewhere(self) -> None:
        """Refuse (RunError) a run that a process of another machine has open in the store."""
        if (mirror := self._look()) and mirror.is_elsewhere:
            raise RunError(
                f"the run {self.name} is open in {mirror.index.process}, or was when that ended; "
                f"wait for it, or take it over by `ratchet resume {self.name}`"
            )

    def is_open(self) -> bool:
        """Return whether a process holds the lock of the run."""
        lock = self.path / "lock"
        if not lock.exists():
            return False
        with lock.open("rb") as file:
            return not lock_file(file, shared=True)

    def is_held(self) -> bool:
        """Return whether a process of this host has the run open, without touching its lock.

        `is_open` takes the lock for a moment, and nobody can open the run in that moment. This
        looks at the files that the process which the lock names has open; a process of another user
        counts as long as it lives.
        """
        lock, named = self.path / "lock", self._holder()
        if named is None or named["host"] != socket.gethostname():
            return False
        try:
            opened = psutil.Process(int(named["process"])).open_files()
        except psutil.AccessDenied:
            return True
        except psutil.NoSuchProcess:
            return False
        return any(Path(file.path) == lock.resolve() for file in opened)

    def is_served(self) -> bool:
        """Return whether the process that has the run open, or had it open last, serves it."""
        named = self._holder()
        return named is not None and named["serves"] is not None

    @contextmanager
    def locked(self, *, to_serve: bool = False) -> Iterator[None]:
        """Keep other processes out; the kernel drops the lock when this process ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as file:
            keep_from_children(file)
            if not lock_file(file):
                file.seek(0)
                raise RunError(f"the run {self.path} is open in {file.read().strip()}; wait for it")
            file.truncate(0)
            serves = f", {SERVES}" if to_serve else ""
            write_note(file, f"process {os.getpid()} on {socket.gethostname()}{serves}")
            yield

    def sweep(self) -> None:
        """Remove what killed writers left unfinished; the engine sweeps its own folder.

        A place is emptied before a rollout is played in it again.
        """
        for left in self.path.rglob(f".*{PARTIAL}"):
            if not {self.engine, self.places} & {*left.parents}:
                left.unlink()

    def take_over(self) -> "RunFolder":
        """Make this process the owner; return the folder with its ownership.

        Raises RunError if it is a copy of a run that another process of this host has open.
        """
        last = last_owner(self.owners)
        here = socket.gethostname(), str(self.path.resolve())
        if last is not None and (last.host, last.folder) != here:
            if last.host == here[0] and RunFolder(Path(last.folder)).is_open():
                raise RunError(
                    f"the run {self.path} is a copy of {last.folder}, which {last} has open; wait "
                    "for that, or continue a fork of it: `ratchet fork` copies what is needed"
                )
            log.warning(
                "the run %s was open last in %s. If that goes on as well, %s",
                self.path,
                last,
                self._what_is_kept()
                if self._mirror()
                else "both train, each for itself, and save their checkpoints under different "
                "names",
            )
        return replace(self, ownership=take_over(self.owners))

    def check_owner(self) -> None:
        """Raise UserError if another process has opened the run since this one did."""
        if self.ownership is not None:
            self.ownership.check()

    def engine_files(self) -> dict[str, int]:
        """Map the files of the run's own engine to their bytes, here and in a store."""
        files = [path for path in self.engine.rglob("*") if path.is_file()]
        here = {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}
        mirror = self._look()
        return here | mirror.sizes("engine/") if mirror else here

    def remove_files(self, files: Sequence[str]) -> None:
        """Remove files of the engine of an open run, which does not run: here, and in a store."""
        for path in (self.path / name for name in sorted(files)):  # first what records the weights
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
        if mirror := self._mirror():
            mirror.forget(files)

    def delete(self) -> None:
        """Remove the run if no process has it open; files that forks share with it stay theirs."""
        with self.locked(), self.stored(whole=False) as put:
            self.refuse_elsewhere()
            aside = self.path.with_name(f".{self.name}.deleted")
            shutil.rmtree(aside, ignore_errors=True)
            self.path.replace(aside)
            put()
        shutil.rmtree(aside)

    def sizes(self) -> dict[str, int]:
        """Map its folders, "" for itself, to the bytes in them on this machine, a fork's too."""
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.path):
            kind = "".join(Path(folder).relative_to(self.path).parts[:1])
            for name in names:
                with suppress(FileNotFoundError):  # an open run removes files meanwhile
                    found[kind] = found.get(kind, 0) + Path(folder, name).lstat().st_size
        return found

    def _holder(self) -> re.Match[str] | None:
        """Read who holds the lock, or held it last; None if nobody has."""
        lock = self.path / "lock"
        return HOLDER.fullmatch(lock.read_text(encoding="utf-8")) if lock.exists() else None

    def _mirror(self):
        return _mirrors().open_runs.get(self.path) if store_address() else None

    def _look(self):
        """Return the copy of the run, which is open or has the store's index; None without one."""
        if not (address := store_address()):
            return None
        return self._mirror() or _mirrors().look_at(self.path, runs_root(), address)

    def _what_is_kept(self) -> str:
        """Say in numbers what of a run was brought from a store, and what may be played again."""
        rows = ((shard.stem, row["batch"]) for shard in self.shards() for row in read_rows(shard))
        drawn = {batch_name(shard, number) for shard, number in rows}
        steps, sealed = len(read_log(self.metrics)), self.sealed_batches()
        return (
            f"it puts nothing more into the store. Kept are {counted(steps, 'step')} and, of "
            f"rollout batches, all that were sealed: {len(sealed)}. Played again are at most "
            f"those that were open: {len(drawn - sealed)}"
        )

    def _of(self, policy: str) -> Path:
        return self.path if policy == POLICY else self.path / "policies" / policy

    def _batches(self, shard: str, place: Callable[[str], Path]) -> list[str]:
        """Name the batches of a shard that have a file, in the order of their numbers.

        The shard names its batches. Without it the whole folder is listed, which grows.
        """
        try:
            numbers = {row["batch"] for row in read_rows(self.shard(shard))}
        except (FileNotFoundError, Damaged):
            listed = map(parse_batch, _stems(place("any")))
            numbers = {one.number for one in listed if one.shard == shard}
        names = [batch_name(shard, number) for number in sorted(numbers)]
        return [name for name in names if place(name).exists()]


def _stems(beside: Path) -> set[str]:
    """Return the names of the files with an ending in a folder, without it."""
    ending = beside.suffix
    try:
        names = os.listdir(beside.parent)  # noqa: PTH208 - paths are slow, and there are many
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {name[: -len(ending)] for name in names if name.endswith(ending) and name[0] != "."}


def runs_root(fetched: str | None = None) -> Path:
    """Return the folder of all runs, or of a store's copy, once its runs in `fetched` are there."""
    if not (address := store_address()):
        return working_folder() / (os.environ.get(RUNS) or "runs")
    server = (os.environ.get(name, "") for name in ENDPOINTS)
    named = re.sub(r"[^\w.-]+", "-", "-".join([address, *server])).strip("-")
    root = user_cache().absolute() / "stores" / named
    if fetched is not None:
        _mirrors().fetch_all(root, address, _is_held, fetched)
    return root


def store_address() -> str:
    """Return the address of the object store of all runs; empty if they are in a folder."""
    named = os.environ.get(RUNS, "")
    return named.rstrip("/") if "://" in named else ""


def _mirrors():
    """Import what speaks to object stores, which is an extra."""
    try:
        from ratchet.tasks.storage import mirror
    except ModuleNotFoundError as error:
        raise RunError(
            f"{RUNS}={store_address()} needs {error.name}; `pip install 'ratchet-rl[store]'`"
        ) from None
    return mirror


def folder_of(name: str) -> RunFolder:
    """Return the folder of the run called `name`; RunError if no run can be called that."""
    named = RUN_NAME.fullmatch(name)
    if named is None or named["last"] in UNTRAINED_FOLDERS:
        raise RunError(
            f"{name!r} cannot name a run: use letters of A to Z, digits, '_', '-' and '.', a "
            "letter, a digit or '_' first"
        )
    if len(named["last"]) > LONGEST_RUN_NAME:
        raise RunError(f"{name!r} cannot name a run: use at most {LONGEST_RUN_NAME} letters")
    return RunFolder(runs_root() / name).fetched()


def _is_held(folder: Path) -> bool:
    return RunFolder(folder).is_held()


def all_runs() -> list[RunFolder]:
    """List the runs, by name."""
    return [RunFolder(path.parent) for path in sorted(runs_root("").glob("[!.]*/manifest.json"))]


def remove_leftovers() -> tuple[int, int]:
    """Remove what runs that are removed have left; count the objects of a store, and their bytes.

    A folder is left of a run whose removal was killed.
    """
    for path in runs_root().glob(".*.deleted"):
        shutil.rmtree(path)
    return _mirrors().remove_unnamed(address) if (address := store_address()) else (0, 0)


def name_run(*parts: str) -> str:
    """Join parts, such as an agent's name, into a name that a run can have; keep its end."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts))[-LONGEST_RUN_NAME:].strip("-.")
