"""Prefect's embedded server ends with the command that started it, and leaves no orphan."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.server.embedded_server import APP, EPHEMERAL, sweep_orphans
from tests.support.processes import ROOT

STARTS = """
import time
from flows.server.embedded_server import EmbeddedServer
EmbeddedServer.command = lambda _: ["sleep", "600"]
print(EmbeddedServer()._run_uvicorn_command().pid, flush=True)
time.sleep(600)
"""

ORPHAN = """
import os, subprocess, sys
words = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
print(subprocess.Popen(words, **silent).pid)
"""


def ends(process: int) -> bool:
    """Wait until a process has ended, a minute at most; return whether it has."""
    psutil.wait_procs([psutil.Process(process)] if psutil.pid_exists(process) else [], timeout=60)
    return not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie"


def test_a_server_ends_when_its_command_is_killed() -> None:
    command = [sys.executable, "-c", STARTS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert psutil.pid_exists(server)
        os.kill(parent.pid, signal.SIGKILL)
    assert ends(server)


@pytest.fixture
def orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Start a server of a database of its own as earlier versions left them."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    environment = {**os.environ, EPHEMERAL: "1"}
    made = subprocess.run(
        [sys.executable, "-c", ORPHAN, APP], env=environment, capture_output=True, check=True
    )
    yield int(made.stdout)
    if psutil.pid_exists(int(made.stdout)):
        psutil.Process(int(made.stdout)).kill()


@pytest.mark.skipif(sys.platform != "linux", reason="an orphan's parent is another process there")
def test_a_server_that_was_left_behind_is_swept(orphan: int) -> None:
    if psutil.Process(orphan).ppid() != 1:
        pytest.skip("another process than the first one adopts orphans here")
    sweep_orphans()
    assert ends(orphan)


def test_a_server_of_a_living_command_or_of_another_database_is_not_swept(
    orphan: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)", APP]
    with subprocess.Popen(words, env={**os.environ, EPHEMERAL: "1"}) as living:
        monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "other"))
        sweep_orphans()
        assert living.poll() is None
        assert psutil.pid_exists(orphan)
        living.kill()
