"""A Dask cluster that is started by its commands, as on machines of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from distributed import Client

from tests.support.processes import ROOT, free_port

STARTING_SECONDS = 240


class HandCluster:
    """A scheduler and workers on loopback, each with its log in a folder."""

    def __init__(self, folder: Path, scheme: str = "tcp", **variables: str) -> None:
        self.port = free_port()
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self._folder = folder
        self._scheme = scheme
        self._variables = variables
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start the scheduler, at the same address each time."""
        words = f"scheduler --host 127.0.0.1 --port {self.port} --protocol {self._scheme}"
        self.start("scheduler", words)

    def start_worker(self, name: str, threads: int = 1) -> None:
        """Start a worker with its nanny."""
        self.start(name, f"worker {self.address} --host 127.0.0.1 --nthreads {threads}")

    def start(self, name: str, words: str) -> None:
        """Start a command of Dask."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                dask_command(f"{words} --dashboard-address 127.0.0.1:0"),
                cwd=ROOT,
                env={**os.environ, **self._variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a process and its children."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return what a process has logged."""
        return (self._folder / f"{name}.log").read_text()

    def wait_for_workers(self, count: int) -> None:
        """Wait until the cluster has `count` workers."""
        with Client(self.address, set_as_default=False, timeout=STARTING_SECONDS) as client:
            client.wait_for_workers(count, timeout=STARTING_SECONDS)

    def close(self) -> None:
        """Kill everything."""
        for name in list(self.processes):
            self.kill(name)


@contextmanager
def by_hand(folder: Path, workers: Mapping[str, int]) -> Iterator[HandCluster]:
    """Start a cluster with workers of so many threads each."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = HandCluster(folder)
    try:
        for name, threads in workers.items():
            cluster.start_worker(name, threads)
        if workers:
            cluster.wait_for_workers(len(workers))
        yield cluster
    finally:
        cluster.close()


def dask_command(words: str) -> list[str]:
    """Return Dask's command line with these words."""
    return [sys.executable, "-m", "dask", *words.split()]
