"""The engine as a child process, which cannot outlive its parent: it ends when its stdin closes."""

import atexit
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Thread

from ratchet.adapters.errors import EngineDied, ServiceError
from ratchet.adapters.network.addresses import check_listener
from ratchet.adapters.process.child import ChildProcess, last_line, run_to_end, tell_status
from ratchet.adapters.tinker.known_models import KNOWN
from ratchet.durable.files import sha256_of, unsealed

LOCAL = "local/"
HOSTED = "hosted Tinker"
"""What the service is called that the SDK knows by itself."""
LOG = "engine.log"
STATE_LOCK = "lock"
ENGINE_CLOSING_SECONDS = 5

REFUSAL = "engine: "
"""Beginning of the line in which the engine says what it cannot read."""
FOLDER_CLOSED = b"closed\n"
"""Line of an engine that has let go of the folder that it served."""
READ = ("HF_", "HOME", "OMP_", "TORCH_", "XDG_")
"""Prefixes of the variables that an engine, or what it loads, may read. Torch's compiler, which no
engine uses, sets variables of this process that begin with TORCHINDUCTOR_."""
OFFLINE = "HF_HUB_OFFLINE"
SERVICE = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
"""Variables that name a service, or a key of one."""

Place = tuple[str, frozenset[tuple[str, str]]]
"""What a new engine depends on: working directory, variables."""

_begun: dict[Place, "EngineProcess"] = {}
"""The engine that was begun and has no model yet, if there is one."""
_kept: list[dict[tuple[str, Place], list["EngineProcess"]]] = []
"""For each `engines_kept` block that is open, the engines of a base model without a folder."""


@dataclass(frozen=True)
class TinkerServer:
    """Address of a server of the Tinker API; an engine of ours has a process that may die.

    A bridge speaks to its server by the wire of an `older_sdk`.
    """

    url: str | None
    key: str | None = field(repr=False)
    died: Future[None]
    process: int | None
    older_sdk: str = ""


@dataclass(frozen=True)
class EngineProcess:
    """A child process that serves the Tinker API once stdin has named its model and its folder."""

    child: ChildProcess
    key: str = field(repr=False)
    place: Place = field(repr=False)

    def open(self, base_model: str, state: Path) -> str:
        """Have the engine serve, and return its URL; ServiceError if it does not start."""
        state.mkdir(parents=True, exist_ok=True)
        self.child.tell(json.dumps([base_model, str(state)]).encode())
        url = ""
        while line := self.child.hear():
            name, _, value = line.decode().removeprefix("export ").strip().partition("=")
            if name == "TINKER_BASE_URL":
                url = value
            elif url:  # the last line of those that say that it serves
                return url
        refusal = _last_line(state)
        if refusal.startswith(REFUSAL):
            raise ServiceError(refusal.removeprefix(REFUSAL))
        raise ServiceError(f"the engine did not start: {_describe_log(state)}")

    def is_alive(self) -> bool:
        return self.child.process.poll() is None

    def let_go(self) -> bool:
        """Have the engine serve its folder no longer; return whether it can serve another."""
        self.child.tell(b"")
        return self.child.hear(ENGINE_CLOSING_SECONDS) == FOLDER_CLOSED

    def close(self) -> None:
        self.child.end(ENGINE_CLOSING_SECONDS)


def needs_engine(base_model: str) -> bool:
    """Tell whether the environment names no server of the model, by URL or by a key.

    No service has the models that are fetched.
    """
    url, *keys = map(os.environ.get, SERVICE)
    return not url and (base_model.startswith(LOCAL) or base_model in KNOWN or not any(keys))


def service_url() -> str:
    """Return the address of the service that the environment names."""
    return os.environ.get("TINKER_BASE_URL") or HOSTED


def check_key() -> None:
    """Refuse a key that the SDK would refuse, before anything starts. The key is not shown."""
    key = os.environ.get("TINKER_API_KEY")
    if key and not key.startswith(("tml-", "eyJ")):
        raise ServiceError(
            f"TINKER_API_KEY ({len(key)} characters) is not a Tinker key: one starts with 'tml-'. "
            "Set the right key, or unset it to run on the engine of this machine"
        )


def check_reachable() -> None:
    """Raise UserError if nothing listens at TINKER_BASE_URL: the SDK would wait for minutes."""
    if url := os.environ.get("TINKER_BASE_URL"):
        remedy = "start it, mend TINKER_BASE_URL, or unset it to run on the engine of this machine"
        check_listener(url, f"the Tinker service at {url}", remedy)


def stay_offline(base_model: str) -> None:
    """Keep this process from asking the hub, for minutes, for a model that only the cache has."""
    if base_model.startswith(LOCAL):
        os.environ.setdefault(OFFLINE, "1")


def begin_engine() -> None:
    """Have an engine load its libraries, for any model, unless the environment names a service.

    One that no run needs ends with this process.
    """
    if not (_begun or any(map(os.environ.get, SERVICE))):
        atexit.register(end_begun)
        _begun[_place()] = _start()


@contextmanager
def engines_kept() -> Iterator[None]:
    """Keep engines within this block: an engine that a run needs no more serves a later run.

    This saves the start of an engine, which takes seconds.
    """
    kept: dict[tuple[str, Place], list[EngineProcess]] = {}
    _kept.append(kept)
    try:
        yield
    finally:
        _kept[:] = [other for other in _kept if other is not kept]  # two may be equal
        for engine in chain.from_iterable(kept.values()):
            engine.close()


def end_begun() -> None:
    """End the engine that was begun, if no run has taken it."""
    while _begun:
        _begun.popitem()[1].child.end(0)  # it may load for seconds yet


def _take_kept(base_model: str, place: Place) -> EngineProcess | None:
    for kept in _kept:
        while engines := kept.get((base_model, place)):
            engine = engines.pop()
            if engine.is_alive():
                return engine
            engine.close()
    return None


def _keep(base_model: str, engine: EngineProcess) -> bool:
    """Keep an engine that is needed no more, if it can be; return whether it is kept."""
    if not _kept or not engine.is_alive() or not engine.let_go():
        return False
    _kept[-1].setdefault((base_model, engine.place), []).append(engine)
    return True


def _place() -> Place:
    """Return where an engine would start. No engine that has its model asks a hub for another."""
    variables = ((name, os.environ[name]) for name in os.environ if name != OFFLINE)
    return str(Path.cwd()), frozenset(one for one in variables if one[0].startswith(READ))


@contextmanager
def running_engine(base_model: str, state: Path) -> Iterator[TinkerServer]:
    place = _place()
    engine = _begun.pop(place, None) or _take_kept(base_model, place) or _start()
    died: Future[None] = Future()
    try:
        url = engine.open(base_model, state)
        Thread(target=_watch, args=(engine.child.process, state, died), daemon=True).start()
        yield TinkerServer(url, engine.key, died, engine.child.process.pid)
    finally:
        died.cancel()
        if not _keep(base_model, engine):
            engine.close()


def prepare_base(base: str) -> Path:
    """Return the folder of a base's files, which the first call writes into the user's cache.

    ServiceError if the base cannot be prepared.
    """
    command = [sys.executable, "-P", "-m", "ratchet.engine", "--prepare", "--base-model", base]
    ended = run_to_end(command)
    if ended.returncode:
        said = last_line(ended.stderr)
        if said.startswith(REFUSAL):
            raise ServiceError(said.removeprefix(REFUSAL))
        raise ServiceError(
            f"{base} cannot be prepared: the engine {tell_status(ended.returncode)} ({said}); "
            "mend that, and give the command again"
        )
    return Path(ended.stdout.splitlines()[-1])


def saved_files(state: Path, sampler: str = "") -> list[Path]:
    """List what an engine saved or, of that, only the weights of a tinker:// path.

    An engine replaces its files and never changes one.
    """
    weights = f"/{sampler.removeprefix('tinker://')}"
    return [
        path
        for path in sorted(state.rglob("*"))
        if path.is_file()
        and path.name not in (STATE_LOCK, LOG)
        and not any(part.startswith(".") for part in path.relative_to(state).parts)
        and weights in path.as_posix()
    ]


def weights_record(state: Path, address: str) -> Path:
    """Return the file in which an engine records the weights of a tinker:// path."""
    return state / "checkpoints" / f"{address.removeprefix('tinker://')}.json"


def files_of(files: Iterable[str], address: str) -> list[str]:
    """List those of some files of a run that an engine has of the weights of a tinker:// path."""
    key = address.removeprefix("tinker://")
    record, tensors = f"engine/checkpoints/{key}.json", f"engine/tensors/{key}."
    return [path for path in files if path == record or path.startswith(tensors)]


def damaged_weights(state: Path, address: str) -> list[Path]:
    """List what is missing, or not as an engine saved it, of the weights of a tinker:// path.

    Their record says what there should be; without a whole record it is the record alone.
    """
    path = weights_record(state, address)
    try:
        record = json.loads(unsealed(path.read_bytes()))
    except (OSError, ValueError):
        return [path]
    folder = state / "tensors" / record["run"] / record["kind"] / record["folder"]
    files = {folder / name: digest for name, digest in record["sha256"].items()}
    return [file for file, digest in files.items() if sha256_of(file) != digest]


def _start() -> EngineProcess:
    key = f"tml-{secrets.token_hex(24)}"
    command = [sys.executable, "-P", "-m", "ratchet.engine", "--port", "0", "--state", "-"]
    child = ChildProcess(command, {**os.environ, "TINKER_API_KEY": key})
    return EngineProcess(child, key, _place())


def _watch(process: subprocess.Popen[bytes], state: Path, died: Future[None]) -> None:
    code = process.wait()
    if died.set_running_or_notify_cancel():
        died.set_exception(
            EngineDied(
                f"the engine (process {process.pid}) {tell_status(code)}, and "
                f"{_describe_log(state)}; start the same run again and it continues"
            )
        )


def _describe_log(state: Path) -> str:
    """Describe the engine's log, in a clause: where it is, and its last line."""
    log, last = state / LOG, _last_line(state)
    return f"its log {log} ends with: {last}" if last else f"its log {log} is empty"


def _last_line(state: Path) -> str:
    """Return the last line of the engine's log; empty if the log is."""
    log = state / LOG
    return last_line(log.read_text(errors="replace")) if log.exists() else ""
