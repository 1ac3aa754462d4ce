"""Workers on another host: two network namespaces, the run in one and its workers in the other."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tasks.journal import read_journal

ROOT = Path(__file__).parent.parent
HERE, THERE = "ratchet-here", "ratchet-there"
ADDRESSES = {HERE: "10.77.0.1", THERE: "10.77.0.2"}
SERVER = f"http://{ADDRESSES[HERE]}:4200/api"
RATCHET = [sys.executable, "-m", "flows.cli"]
SHORT = ["--set", "steps=2", "--set", "rollouts.groups=8"]
TRAIN = [*RATCHET, "train", "guess_the_number", *SHORT]
CUT_SECONDS = 20.0
"""Longer than a lease lasts."""

pytestmark = [
    pytest.mark.skipif(
        "TWO_HOSTS" not in os.environ,
        reason="network namespaces are made by root alone; `make hosts` asks for them",
    ),
    pytest.mark.timeout(600),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass(frozen=True)
class Host:
    """A host name and network of its own, and a folder instead of a disk."""

    name: str
    folder: Path

    def start(self, *command: str, **variables: str) -> "subprocess.Popen[bytes]":
        alone = ["ip", "netns", "exec", self.name, "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        own = {"HOME": str(self.folder), "RATCHET_RUNS": str(self.folder), "RATCHET_TOKEN": "word"}
        ours = ("PREFECT_", "TINKER_")
        known = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                alone + named, cwd=ROOT, env=known | own | variables, stdout=log, stderr=log
            )

    def reconnect(self) -> None:
        ip("-n", self.name, "link", "set", "wire", "up")

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", "wire", "down")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as made:
        for name in ADDRESSES:
            ip("netns", "add", name)
            made.callback(ip, "netns", "del", name)
        ip("link", "add", "wire", "netns", HERE, "type", "veth", "peer", "wire", "netns", THERE)
        here, there = (Host(name, tmp_path_factory.mktemp(name)) for name in ADDRESSES)
        for host in (here, there):
            ip("-n", host.name, "addr", "add", f"{ADDRESSES[host.name]}/24", "dev", "wire")
            ip("-n", host.name, "link", "set", "lo", "up")
            host.reconnect()
        yield here, there


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Programs that are ended with the test."""
    with ExitStack() as programs:

        def start(host: Host, *command: str, **variables: str) -> "subprocess.Popen[bytes]":
            program = programs.enter_context(host.start(*command, **variables))
            programs.callback(program.terminate)
            return program

        yield start


def until(true: Callable[[], Any]) -> None:
    deadline = monotonic() + 240
    while not true():
        assert monotonic() < deadline, "it has not come in 240 s"
        sleep(0.1)


def ends(run: Path, batch: str = "*") -> list[dict[str, Any]]:
    journals = sorted(run.glob(f"journal/{batch}.jsonl"))
    spans = [span for path in journals for span in read_journal(path)]
    return [span for span in spans if span["kind"] in ("reward", "error")]


def players(run: Path, batch: str = "*") -> set[str]:
    return {end["attributes"]["player"] for end in ends(run, batch)}


def learnt(run: Path) -> dict[str, str]:
    """Digests of the last weights, of the optimizer's state, and of all that was trained on."""
    last = json.loads((run / "checkpoints.jsonl").read_text().splitlines()[-1])
    state = last["state"].removeprefix("tinker://")
    files = [*run.rglob(f"{state}.*/*.safetensors"), *run.glob("datums/*.parquet")]
    assert len(files) == 4
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def test_workers_of_another_host_of_which_one_is_killed_and_one_cut_off_train_the_same(
    hosts: tuple[Host, Host], started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    here, there = hosts
    assert started(here, *TRAIN, "--run", "alone").wait() == 0

    started(here, sys.executable, "-m", "prefect", "server", "start", "--host", ADDRESSES[HERE])
    apart = ["--rollouts", "workers", "--set", "rollouts.listen=0.0.0.0"]
    team = started(here, *TRAIN, "--run", "team", *apart, PREFECT_API_URL=SERVER)
    worker = [*RATCHET, "worker", "--server", SERVER, "--concurrency", "4"]
    killed, survivor = started(there, *worker), started(there, *worker)

    run = here.folder / "team"
    until(lambda: f"{THERE}-{killed.pid}" in players(run, "train-00000"))
    killed.kill()
    until(lambda: players(run, "train-00001"))
    there.cut()
    sleep(CUT_SECONDS)
    there.reconnect()
    assert team.wait() == 0

    assert learnt(run) == learnt(here.folder / "alone")
    assert players(run) == {f"{THERE}-{killed.pid}", f"{THERE}-{survivor.pid}"}
    assert all(any(end["attempt"] for end in ends(run, f"train-0000{step}")) for step in (0, 1))
    assert not [end for end in ends(run) if end["kind"] == "error"]
