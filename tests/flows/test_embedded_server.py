"""Prefect's embedded server loads before it is needed, and ends with the command that began it."""

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

from ratchet.flows.server import prefect_startup
from ratchet.flows.server.embedded_server import EmbeddedServer
from ratchet.flows.server.prefect_startup import begin_server
from tests.support.processes import ROOT

SERVING_SECONDS = 300.0

STARTS = """
import time
from ratchet.flows.server.embedded_server import EmbeddedServer
server = EmbeddedServer()
print(server.child.process.pid, flush=True)
{starts}
print("serving", flush=True)
time.sleep(600)
"""
REFUSED = """
import sys
from ratchet.flows.cli import main
from ratchet.flows.server import embedded_server

class Told(embedded_server.EmbeddedServer):
    def __init__(self):
        assert "ratchet.flows.cli.training" not in sys.modules
        super().__init__()
        print(self.child.process.pid, flush=True)

embedded_server.EmbeddedServer = Told
sys.argv[1:] = ["train", "nonsense"]
main.main()
"""
RECORDS = """
from ratchet.flows.server.prefect_startup import quiet_prefect, start_server
quiet_prefect(verbose=False)
from prefect import flow, task

@task
def play():
    pass

@flow
def train():
    play()

with start_server() as serving, serving():
    train()
"""
COUNTED = "select (select count(*) from events), (select count(*) from event_resources)"
SERVES = f"server.start(); server.wait({SERVING_SECONDS})"


def ends(process: int) -> bool:
    """Wait until a process has ended, a minute at most; return whether it has."""
    psutil.wait_procs([psutil.Process(process)] if psutil.pid_exists(process) else [], timeout=60)
    return not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a folder for Prefect's database that is not there yet."""
    home = tmp_path / "prefect"
    monkeypatch.setenv("PREFECT_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return home


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("starts", ["", SERVES], ids=["while it loads", "while it serves"])
def test_a_server_ends_when_its_command_is_killed(starts: str) -> None:
    command = [sys.executable, "-c", STARTS.format(starts=starts)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert parent.stdout.readline() == "serving\n"
        assert psutil.pid_exists(server)
        parent.send_signal(signal.SIGKILL)
    assert ends(server)


def test_a_server_that_is_killed_serves_again_at_its_address(home: Path) -> None:
    server = EmbeddedServer()
    try:
        assert not (home / "prefect.db").exists(), "it opens nothing before it is started"
        server.start()
        server.wait(SERVING_SECONDS)
        url = server.api_url
        assert server.answers()
        server.child.process.kill()
        server.child.process.wait()
        assert not server.answers()
        server.restart()
        server.wait(SERVING_SECONDS)
        assert server.api_url == url
        assert httpx.get(f"{url}/health").is_success
    finally:
        server.stop()
    server.stop()  # as at the exit of a command whose server has ended
    assert server.child.process.returncode == 0


def test_a_task_run_is_in_the_database_and_no_event(home: Path) -> None:
    subprocess.run([sys.executable, "-c", RECORDS], cwd=ROOT, check=True)
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        names = database.execute("select state_name from task_run").fetchall()
        counts = database.execute(COUNTED).fetchone()
    assert names == [("Completed",)]
    assert counts == (0, 0)


@pytest.mark.usefixtures("home")
def test_a_command_begins_a_server_first_and_leaves_none_if_it_is_refused() -> None:
    command = [sys.executable, "-c", REFUSED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no training deployment 'nonsense'" in ended.stderr
    assert ends(int(ended.stdout))


def test_no_server_is_begun_where_another_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setattr(prefect_startup, "_begun", begun := [])
    begin_server()
    assert begun == []
