"""The fork server of a program in Python: it imports what the program has imported, and forks.

It runs in the program's own interpreter, from Python 3.9, without Ratchet's packages. argv names
the packages that each rollout imports for itself, and a socket on which `fork_client.py` hands over
a socket of its own. A fork is two processes: the program, and its keeper, which outlives the
server, and ends the program with the client.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import resource
import runpy
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from typing import Any

INSTALLED = (f"{Path(os.__file__).parent}{os.sep}", "/site-packages/", "/dist-packages/")

QUIET_SECONDS = 3.0
"""Time without an import after which the others wait no longer for the first rollout's end."""

THREAD_SECONDS = 5.0
"""Time in which a thread that an import has started may end, such as one that asks for a file."""

PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36
"""Numbers of two options of a process in Linux's prctl: PR_SET_PDEATHSIG and so on."""


def main() -> None:
    *own, number = sys.argv[1:]
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    if sys.path and Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]
    answers = os.dup(1)
    os.dup2(2, 1)  # what a module prints is no answer
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    tried: set[str] = set()
    gc.disable()
    waited, seconds = [channel.fileno()], None
    while True:
        ready, _, _ = select(waited, [], [], seconds)
        if channel.fileno() in ready:
            if reason := burden():
                os.write(answers, json.dumps(reason).encode())
                os._exit(0)  # a thread would keep it
            handed = socket.recv_fds(channel, 1, 1)[1]
            if not handed:
                return
            with socket.socket(fileno=handed[0]) as control, suppress(OSError):
                if forked := fork(control, channel, (answers, told)):
                    break
            if told not in waited:
                waited, seconds = [told], QUIET_SECONDS  # what the first imports is for all
        elif not ready or learn(os.read(told, 2**20), tried):
            waited, seconds = [told, channel.fileno()], None
    become(*forked, Teller(tell, own))


def learn(lines: bytes, tried: set[str]) -> bool:
    """Import modules that programs have, unless this path finds a file other than theirs.

    Returns whether a program has ended.
    """
    ended = False
    for line in lines.splitlines():
        name, file = json.loads(line)
        ended |= name == ""
        if name not in tried and name not in sys.modules:
            tried.add(name)
            with suppress(BaseException):  # whatever it raises, the program meets it too
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.origin == file:
                    importlib.import_module(name)
    return ended


def burden() -> str:
    """Say what the imports have left that no fork can have, unless it ends in a while."""
    until = time.monotonic() + THREAD_SECONDS
    while True:
        reason, threads = "", len([*Path("/proc/self/task").glob("*")]) or threading.active_count()
        if threads > 1:
            known = [one.name for one in threading.enumerate()[1:]]
            reason = f"they start {threads - 1} threads ({', '.join(known) or 'not by Python'})"
        elif sum(link.startswith("socket:") for _, link in descriptors()) > 1:
            reason = "they keep a connection open"
        if not reason or time.monotonic() > until:
            return reason or generators(len(sys.modules))
        time.sleep(0.1)


@cache
def generators(_: int) -> str:
    """Say which generators of random numbers the modules keep: all forks would draw the same."""
    loaded: dict[str, Any] = sys.modules
    kinds, renewed = list[type](), list[object]()
    if "random" in loaded:
        own = getattr(loaded.get("tempfile"), "_name_sequence", None)
        renewed += [loaded["random"]._inst, getattr(own, "_rng", None)]
        kinds += [loaded["random"].Random]
    if "numpy.random" in loaded:
        renewed += [loaded["numpy.random"].mtrand._rand]
        kinds += [loaded["numpy.random"].Generator, loaded["numpy.random"].RandomState]
    found = {
        type(one).__name__
        for one in gc.get_objects()
        if issubclass(type(one), (*kinds,)) and all(one is not other for other in renewed)
    } - {"SystemRandom"}
    return f"they keep generators of random numbers ({', '.join(sorted(found))})" * bool(found)


def descriptors() -> list[tuple[int, str]]:
    """Return this process's descriptors and what they are of, as far as the system tells."""
    found = []
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found.append((int(link.name), str(link.readlink())))
    return found


def fork(
    control: socket.socket, channel: socket.socket, others: tuple[int, int]
) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a keeper, which forks the program; return the program's request and streams in it."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
            pass
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return None
    program = -1
    try:
        channel.close()
        for descriptor in others:
            os.close(descriptor)
        os.setsid()
        set_option(CHILD_SUBREAPER, 1)  # what the program leaves becomes the keeper's
        streams = socket.recv_fds(control, 1, 3)[1]
        with control.makefile("rb") as lines:
            request = json.loads(lines.readline())
        control.send(b"+")
        program = os.fork()
        if program:
            keep(program, control, streams)
    finally:
        if program:
            os._exit(1)
    return request, streams


def set_option(option: int, value: int) -> None:
    with suppress(AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def keep(program: int, control: socket.socket, streams: list[int]) -> None:
    """Wait for the end of a program, kill what it has left, and tell its status."""
    for stream in (0, 1, 2, *streams):
        os.close(stream)

    def end_with_client() -> None:
        control.recv(1)
        os.kill(program, signal.SIGKILL)

    threading.Thread(target=end_with_client, daemon=True).start()
    _, status = os.waitpid(program, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGKILL)
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):  # until there are none, also of those that become its own
        while listed.exists():
            for child in listed.read_text().split():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
    control.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(request: dict[str, Any], streams: list[int], teller: Teller) -> None:
    """Be the program of a rollout."""
    set_option(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, request["limit"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    renew()
    sys.meta_path.insert(0, teller)
    try:
        run(request["words"])
    finally:
        teller.find_spec()
        teller.tell("")  # its end


def renew() -> None:
    """Have nothing of this process be as in other forks: `random` renews itself."""
    gc.freeze()  # so that no collection copies the pages of all that the server has imported
    gc.enable()
    loaded: dict[str, Any] = sys.modules
    if "tempfile" in loaded:
        loaded["tempfile"].tempdir = None  # it follows TMPDIR
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    for number, _ in descriptors():
        if number > 2 and stat.S_ISREG(os.fstat(number).st_mode):
            # So that its offset is this process's own.
            opened = os.open(f"/proc/self/fd/{number}", fcntl.fcntl(number, fcntl.F_GETFL))
            os.lseek(opened, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(opened, number, os.get_inheritable(number))
            os.close(opened)


def run(words: list[str]) -> None:
    """Run a program as the interpreter runs it: its module is `__main__`."""
    module = words[1] if words[0] == "-m" else None
    first = Path.cwd() if module else Path(words[0]).resolve().parent
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, str(first))
    sys.argv = words[1:] if module else words
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


class Teller:
    """A finder that finds nothing, and tells what a program has imported of installed modules.

    The packages of the program's `own` are left out: they may read what differs between rollouts.
    """

    def __init__(self, tell: int, own: list[str]) -> None:
        self._tell, self._pipe, self._own = tell, os.fstat(tell), own
        self._known = set(sys.modules)

    def find_spec(self, *_: object) -> None:
        """Tell of the modules since the last call."""
        fresh = [name for name in [*sys.modules] if name not in self._known]
        self._known.update(fresh)
        for name in fresh:
            spec: Any = getattr(sys.modules.get(name), "__spec__", None)
            file = getattr(spec, "origin", None)
            own = name.partition(".")[0] in self._own
            if file and spec.name == name and not own and any(one in file for one in INSTALLED):
                self.tell(name, file)

    def tell(self, name: str, file: str = "") -> None:
        with suppress(OSError):  # the program may have closed the pipe, or nobody has read it
            if os.path.samestat(os.fstat(self._tell), self._pipe):
                os.write(self._tell, json.dumps([name, file]).encode() + b"\n")


if __name__ == "__main__":
    main()
