"""Training runs as processes that a kill harness starts, watches and kills, and their server."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ratchet.tasks.storage.plan_record import child_runs
from ratchet.tasks.storage.run_folder import RunFolder, store_address

ROOT = Path(__file__).parent.parent.parent
STARTING_SECONDS = 180
"""Limit of the Prefect server's start."""
STALLED_SECONDS = 300
"""A process that writes nothing for so long hangs."""
LOOK_SECONDS = 0.02

Environment = Mapping[str, str]


class Stalled(Exception):
    """A process that has stopped writing and does not end."""


@dataclass(frozen=True)
class Training:
    """A `ratchet train` process, and the folder that its run writes."""

    process: subprocess.Popen[bytes]
    run: RunFolder
    started: float
    """Unix time of the start."""
    size: int
    """Bytes of the folder at the start."""

    def engine(self) -> int | None:
        """Return the engine's process id; None if there is no engine."""
        return next(iter(self.children(" -m ratchet.engine ")), None)

    def workers(self) -> list[int]:
        """Return the process ids of the flow's own cluster."""
        return self.children(" spawn_main(")

    def children(self, words: str) -> list[int]:
        """Return the flow's child processes whose command has `words`."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        lines = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
        flow = self.process.pid
        return [int(pid) for pid, parent, args in lines if int(parent) == flow and words in args]

    def written(self) -> int:
        """Return the bytes that the process has added to its run, without the engine's files."""
        return size_of(self.run) - self.size

    def writes(self, size: float) -> bool:
        """Wait until `size` bytes are written; return False if the process ends before.

        Stalled if the process writes nothing for STALLED_SECONDS.
        """
        written, since = self.written(), time.monotonic()
        while written < size:
            if self.ends_within(LOOK_SECONDS):
                return False
            before, written = written, self.written()
            if written != before:
                since = time.monotonic()
            elif time.monotonic() - since > STALLED_SECONDS:
                self.abort()
                raise Stalled(f"{self.run.path} wrote nothing for {STALLED_SECONDS} s")
        return True

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the process; return False if it outlives `seconds`."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int:
        """Wait for the end of the process; Stalled if it stops writing."""
        self.writes(float("inf"))
        return self.process.returncode

    def abort(self) -> None:
        """End a process that hangs; its log gets the stack of every thread."""
        self.process.send_signal(signal.SIGABRT)
        self.process.wait()

    def kill(self, victim: str) -> str:
        """Send SIGKILL to the flow's process, its engine, or both; return who was killed.

        The flow's process is killed if no engine runs yet. The door is a server in that process.
        """
        engine = self.engine() if victim != "flow" else None
        if engine is None:
            victim = "flow"
        if victim != "engine":
            self.process.kill()
        if engine is not None:
            os.kill(engine, signal.SIGKILL)
        return victim

    def ends_or_goes_on(self, engine: int | None, seconds: float) -> bool:
        """Wait until the process ends or has another engine; return False if neither comes."""
        until = time.monotonic() + seconds
        while not self.ends_within(LOOK_SECONDS):
            if engine is not None and self.engine() not in (None, engine):
                return True
            if time.monotonic() > until:
                return False
        return True


def train(
    run: RunFolder,
    settings: Sequence[str],
    environment: Environment,
    recipe: str = "hello",
    program: str = "ratchet.flows.cli.main",
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
) -> Training:
    """Start the program's `train` on a run; a run that exists is continued."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = f"-m {program} train {recipe} --run {run.name} --if-exists resume".split()
    started, size = time.time(), size_of(run)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    with log_of(run).open("ab") as log:
        process = popen(
            [sys.executable, *command, *overrides],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, "RATCHET_RUNS": store_address() or str(run.path.parent)},
            process_group=0,  # which Ctrl-C reaches whole
        )
    return Training(process, run, started, size)


def train_to_end(
    run: RunFolder,
    settings: Sequence[str],
    environment: Environment,
    recipe: str = "hello",
    program: str = "ratchet.flows.cli.main",
) -> None:
    """Train a run, which nothing interrupts; SystemExit if it fails."""
    if train(run, settings, environment, recipe, program).exit_code():
        raise SystemExit(f"{run.path} failed; see {log_of(run)}")


def log_of(run: RunFolder) -> Path:
    """Return the file of what a run's processes print."""
    return run.path.with_name(f"{run.name}.log")


def size_of(run: RunFolder) -> int:
    """Count the bytes of the files of a run and of its stages, but not of locks and engines.

    Files and folders may vanish meanwhile: `os.walk` passes over such folders.
    """
    size = sum(map(size_of, child_runs(run)))
    for folder, folders, names in os.walk(run.path):
        if Path(folder) == run.path:
            folders[:] = [name for name in folders if name != run.engine.name]
            names = [name for name in names if name.endswith(".jsonl")]
        else:
            folders.clear()
        for name in names:
            if "." in name and not name.startswith("."):
                with suppress(FileNotFoundError):
                    size += (Path(folder) / name).stat().st_size
    return size


def environment(home: Path, api: str) -> dict[str, str]:
    """Return the environment of every process: one Prefect server, no Tinker service, offline."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "PREFECT_"))}
    return {
        **kept,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PYTHONFAULTHANDLER": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """Start a Prefect server that outlives the killed processes; yield its API's URL."""
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    variables = environment(home, api)
    with (
        (home / "server.log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-m", *command], cwd=home, env=variables, stdout=log, stderr=log
        ) as server,
    ):
        try:
            _wait_for(f"{api}/health", server, home / "server.log")
            yield api
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(f"the Prefect server did not start; its log is {log}")


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
