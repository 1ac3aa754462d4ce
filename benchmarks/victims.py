"""The processes that the kill harness kills: a training run and its engine."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
STARTING_SECONDS = 180
LOOK_SECONDS = 0.02

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Training:
    """A `ratchet train` process, and its run's folder."""

    process: subprocess.Popen[bytes]
    run: Path
    started: float
    """Start of the process, in Unix time."""
    size: int
    """Size of the folder at the start of the process, in bytes."""

    def engine(self) -> int | None:
        """Return the engine's process id, or None before the engine runs."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        for line in listed.stdout.splitlines():
            pid, parent, command = line.split(maxsplit=2)
            if int(parent) == self.process.pid and " -m engine " in command:
                return int(pid)
        return None

    def written(self) -> int:
        """Count the bytes that the process added to the run, without the engine's files."""
        return size_of(self.run) - self.size

    def ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def train(run: Path, settings: Sequence[str], environment: Environment) -> Training:
    """Start `ratchet train` on a run; a run that exists continues."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = f"-m flows.cli train hello --run {run.name} --if-exists resume".split()
    started, size = time.time(), size_of(run)
    with log_of(run).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *command, *overrides],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, "RATCHET_RUNS": str(run.parent)},
        )
    return Training(process, run, started, size)


def log_of(run: Path) -> Path:
    """Return the file of the output of a run's processes, and make its folder."""
    run.parent.mkdir(parents=True, exist_ok=True)
    return run.with_name(f"{run.name}.log")


def size_of(run: Path) -> int:
    """Count the bytes that the flow wrote, without the lock and the engine's files."""
    return sum(
        path.stat().st_size
        for path in (*run.glob("*.jsonl"), *run.glob("*/*.*"))
        if path.parent.name != "engine" and not path.name.startswith(".")  # such files may vanish
    )


def kill(training: Training, victim: str) -> str:
    """Send SIGKILL to the flow's process (with the door), its engine, or both.

    Before the engine runs, kill the flow's process. Return the killed part.
    """
    engine = training.engine() if victim != "flow" else None
    if engine is None:
        victim = "flow"
    if victim != "engine":
        training.process.kill()
    if engine is not None:
        os.kill(engine, signal.SIGKILL)
    return victim


def environment(home: Path, api: str) -> dict[str, str]:
    """Return the environment of all processes: one Prefect server, and no Tinker service."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "PREFECT_"))}
    return {
        **kept,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """Run a Prefect server that no kill stops, and yield the address of its API."""
    home.mkdir(parents=True, exist_ok=True)
    port = _free_port()
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
