"""Hosts for stories: network namespaces of this machine (Linux, root), joined by a switch.

They run the commands of docs/scaling.md, with the variables of that page.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(
    r"^```sh\n(.*?)^```$", (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"), re.M | re.S
)
_, CERTIFICATES, VARIABLES, SCHEDULER, WORKER, TRAIN = COMMANDS
"""The commands of the document, in its order."""

MISSING = "network namespaces need Linux, root and the package iproute2"
NETWORK = "10.231.77"
SWITCH = "switch"
WAITING_SECONDS = 300.0


class Hosts:
    """Hosts with one network, the processes on them, and the folder of what all of these print.

    The address FLOW of the document's commands is by default the first host's.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self._folder = folder
        self._names = names
        self._prefix = f"ratchet-{os.getpid()}"
        self._numbers: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Hosts":
        with ExitStack() as stack:
            _ip("netns", "add", self._name(SWITCH))
            stack.callback(_ip, "netns", "del", self._name(SWITCH))
            stack.callback(self._remove_all)
            self._inside(SWITCH, "link add bridge type bridge")
            self._inside(SWITCH, "link set bridge up")
            for host in self._names:
                self.add(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, host: str) -> None:
        """Make a host, with an address that no host has had."""
        self._numbers[host] = len(self._numbers) + 1
        _ip("netns", "add", name := self._name(host))
        self._inside(host, "link set lo up")
        self._inside(SWITCH, f"link add to-{host} type veth peer name wire netns {name}")
        self._inside(SWITCH, f"link set to-{host} master bridge up")
        self.give(host, self.address(host))
        self._inside(host, "link set wire up")

    def remove(self, host: str) -> float:
        """Take a host off the network, kill all of its processes, and remove it; return when."""
        self._inside(SWITCH, f"link del to-{host}")
        removed, killed = time.time(), set[int]()
        while found := {int(one) for one in _ip("netns", "pids", self._name(host)).split()}:
            killed |= found
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        for name in [name for name, one in self._processes.items() if one.pid in killed]:
            self._processes.pop(name).wait()
        _ip("netns", "del", self._name(host))
        return removed

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return f"{NETWORK}.{self._numbers[host]}"

    def give(self, host: str, address: str) -> None:
        """Give a host one more address."""
        self._inside(host, f"addr add {address}/24 dev wire")

    def certify(self, *addresses: str) -> None:
        """Make the document's certificates, which name these addresses."""
        script = CERTIFICATES.replace(".venv/bin/python", sys.executable)
        variables = self.environment() | {"FLOW": ",IP:".join(addresses)}
        subprocess.run(
            ["bash", "-ec", script], cwd=ROOT, env=variables, check=True, capture_output=True
        )

    def run(self, host: str, name: str, script: str, folder: Path = ROOT, **variables: str) -> None:
        """Start a shell script on a host, with the variables of the document."""
        named = f"echo {host} > /proc/sys/kernel/hostname\n{VARIABLES}\n{script}"
        inside = ["ip", "netns", "exec", self._name(host), "unshare", "--uts", "bash", "-c", named]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                inside,
                cwd=folder,
                env=self.environment() | {"NODE": host} | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """Return the environment of every process."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "PREFECT_"))}
        return kept | {
            "FLOW": self.address(self._names[0]),
            "CERTS": str(self._folder / "certs"),
            "RATCHET_RUNS": str(self._folder / "runs"),
            "PREFECT_HOME": str(self._folder / "prefect"),
            "PREFECT_LOGGING_LEVEL": "ERROR",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
            "OMP_NUM_THREADS": "1",
        }

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Have this thread open its connections on a host."""
        here, there = Path("/proc/thread-self/ns/net"), Path("/run/netns", self._name(host))
        with here.open() as before, there.open() as wanted:
            _enter(wanted.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def kill(self, name: str) -> float:
        """Kill a script and its children; return when."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return time.time()

    def kill_program(self, name: str) -> float:
        """Kill the program that a script runs, and not the script; return when."""
        subprocess.run(["pkill", "-KILL", "-P", str(self._processes[name].pid)], check=True)
        return time.time()

    def wait(self, name: str) -> int:
        """Wait for the end of a script; return its exit status."""
        return self._processes[name].wait(WAITING_SECONDS)

    def ended(self, name: str) -> bool:
        """Return whether a script has ended."""
        return self._processes[name].poll() is not None

    def connect(self, host: str, up: bool) -> float:
        """Cut or mend the wire of a host; return when."""
        self._inside(SWITCH, f"link set to-{host} {'up' if up else 'down'}")
        return time.time()

    def _remove_all(self) -> None:
        made = _ip("netns", "list").split()
        for host in [host for host in self._numbers if self._name(host) in made]:
            self.remove(host)

    def _inside(self, host: str, words: str) -> None:
        _ip("-n", self._name(host), *words.split())

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"


def permitted() -> bool:
    """Return whether this process may make network namespaces."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return False
    probe = f"ratchet-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True)
    if made.returncode == 0:
        _ip("netns", "del", probe)
    return made.returncode == 0


def dask(command: str) -> str:
    """Return a command line of the document with this Python's Dask."""
    return command.replace(".venv/bin/dask", f"{sys.executable} -m dask")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0x40000000):  # CLONE_NEWNET; `os.setns` is of Python 3.12
        raise OSError(ctypes.get_errno(), "this thread cannot enter a network namespace")
