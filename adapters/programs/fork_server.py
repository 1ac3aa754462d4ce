"""The fork server of a program in Python: it imports modules once, and forks for each rollout.

It runs in the program's own interpreter, from Python 3.9, without Ratchet's packages. Lines of JSON
on stdin ask it to import modules, `{"id": …, "import": [[name, file], …], "seconds": …}`, or to
fork, `{"id": …, "fork": {…}}`; the streams of a fork come through the socket that argv names. A
fork is two processes: the program, and its keeper, which outlives the server and tells the
program's end.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.util
import io
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

BY_PATH, BY_MODULE, BY_TEXT = "path", "module", "text"
"""How a program is named: a file, a module, or its own text."""

LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
INSTALLED = (LIBRARY, "/site-packages/", "/dist-packages/")

REPORT_SECONDS = 0.2
"""Least time between two reports of what a program has imported."""

SHARED = ("socket:", "anon_inode:[eventpoll]")
"""Kinds of descriptors that two processes cannot share."""

PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36
"""Numbers of two options of a process in Linux's prctl: PR_SET_PDEATHSIG and so on."""


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    if sys.path and Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]
    answers = os.dup(1)
    os.dup2(2, 1)  # what a module prints is no answer
    prctl = find_prctl()
    with open(0, "rb", closefd=False) as requests:
        for line in requests:
            request = json.loads(line)
            reap()
            said = {"id": request["id"]}
            if "import" in request:
                said.update(import_modules(request["import"], request["seconds"]))
            elif "fork" in request:
                streams = receive(channel)
                try:
                    forked = fork(streams, (channel.fileno(), answers), prctl)
                except OSError as error:
                    said["failed"] = str(error)
                else:
                    if forked:
                        set_option(prctl, PARENT_DEATH_SIGNAL, signal.SIGKILL)
                        become(request["fork"], streams)
                        return
                for stream in streams:
                    os.close(stream)
            else:
                continue
            os.write(answers, json.dumps(said).encode() + b"\n")
            if "spoiled" in said:
                os._exit(0)  # a thread would keep it


def find_prctl() -> Any:
    if sys.platform == "linux":
        with suppress(ImportError):
            import ctypes

            return ctypes.CDLL(None).prctl
    return None


def set_option(prctl: Any, option: int, value: int) -> None:
    if callable(prctl):
        prctl(option, value, 0, 0, 0)


def reap() -> None:
    """Reap the keepers that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def receive(channel: socket.socket) -> list[int]:
    """Receive a fork's stdin, stdout and stderr, and the pipe on which it tells of itself."""
    _, streams, _, _ = socket.recv_fds(channel, 1, 4)
    for stream in streams:
        os.set_inheritable(stream, False)
    return streams


def import_modules(modules: list[list[str]], seconds: float) -> dict[str, object]:
    """Import modules, unless this path finds a file other than the program's.

    A module spoils the server by a thread or a connection that has not ended after `seconds`: no
    fork has the threads of its parent, and forks would share the connection.
    """
    for name, file in modules:
        if name in sys.modules:
            continue
        before = held()
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin == file:
                importlib.import_module(name)
        except BaseException:  # noqa: BLE001  A module may raise anything; the program meets it too.
            traceback.print_exc()
        if reason := lasting_burden(before, seconds):
            return {"spoiled": name, "reason": reason}
    gc.collect()
    gc.freeze()  # so that no collection of a fork copies the pages of all these objects
    return {"imported": len(modules)}


def held() -> tuple[int, set[str]]:
    """Return the number of this process's threads, and its descriptors that forks cannot share."""
    if not Path("/proc/self/task").is_dir():
        return threading.active_count(), set()
    links = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.add(str(descriptor.readlink()))
    shared = {link for link in links if link.startswith(SHARED)}
    return len([*Path("/proc/self/task").iterdir()]), shared


def lasting_burden(before: tuple[int, set[str]], seconds: float) -> str:
    """Say what an import has left that no fork can have, unless it ends in a while."""
    until = time.monotonic() + seconds
    while reason := burden(before, held()):
        if time.monotonic() > until:
            return reason
        time.sleep(0.1)
    return ""


def burden(before: tuple[int, set[str]], after: tuple[int, set[str]]) -> str:
    if after[0] > 1:
        known = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
        return f"it starts {after[0] - before[0]} threads ({', '.join(known) or 'not by Python'})"
    return "it keeps a connection open" if after[1] - before[1] else ""


def fork(streams: list[int], own: tuple[int, int], prctl: Any) -> bool:
    """Fork a keeper, which forks the program; return True in the program's process.

    `own` are the descriptors of the server that neither may keep open.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return False
    program = -1
    try:
        for descriptor in own:
            os.close(descriptor)
        os.setsid()
        set_option(prctl, CHILD_SUBREAPER, 1)  # what the program leaves becomes the keeper's
        program = os.fork()
        if program:
            keep(program, streams)
    finally:
        if program:
            os._exit(1)
    return True


def keep(program: int, streams: list[int]) -> None:
    """Wait for the end of a program, kill what it has left, and tell its status."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    *others, control = streams
    for stream in others:
        os.close(stream)
    _, status = os.waitpid(program, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGKILL)
    end_orphans()
    tell(control, {"status": os.waitstatus_to_exitcode(status)})


def end_orphans() -> None:
    """Kill all children of this process, and theirs, which become its own."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    while listed.exists():
        for child in listed.read_text().split():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def tell(control: int, said: object) -> None:
    """Write a line; the one before may have been torn by its writer's end."""
    with suppress(OSError):
        os.write(control, b"\n" + json.dumps(said).encode() + b"\n")


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Be the program of a rollout, once its stdin has the empty line that it begins with."""
    os.setsid()
    *standard, control = streams
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
        os.close(stream)
    tell(control, {"program": os.getpid(), "keeper": os.getppid()})
    if os.read(0, 1) != b"\n":
        os._exit(0)
    if (most := request["most_bytes"]) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    renew()
    reporter = Reporter(control, request["own"])
    sys.meta_path.insert(0, reporter)
    try:
        run(request["how"], request["name"], request["arguments"])
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  It is shown as the interpreter shows it.
        shown = error.with_traceback(own_frames(error))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(1)
    finally:
        reporter.report()


def renew() -> None:
    """Have nothing of this process be as in other forks: `random` renews itself."""
    loaded: dict[str, Any] = sys.modules
    if "tempfile" in loaded:
        loaded["tempfile"].tempdir = None  # it follows TMPDIR
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()


def run(how: str, name: str, arguments: list[str]) -> None:
    """Run a program as the interpreter runs it: its module is `__main__`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        first = {BY_PATH: Path(name).resolve().parent, BY_MODULE: Path.cwd(), BY_TEXT: ""}[how]
        sys.path.insert(0, str(first))
    if how == BY_MODULE:
        sys.argv = ["-m", *arguments]
        runpy._run_module_as_main(name)  # pyright: ignore[reportAttributeAccessIssue]
    elif how == BY_PATH:
        sys.argv = [name, *arguments]
        main.__dict__["__file__"] = name
        with io.open_code(str(Path(name).absolute())) as file:
            code = compile(file.read(), name, "exec")
        exec(code, main.__dict__)
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(name, "<string>", "exec"), main.__dict__)


def own_frames(error: BaseException) -> types.TracebackType | None:
    """Return an error's traceback from the first line of the program on."""
    shown = error.__traceback__
    while shown is not None:
        file = shown.tb_frame.f_code.co_filename
        if file not in (__file__, runpy.__file__, "<frozen runpy>"):
            break
        shown = shown.tb_next
    return shown


class Reporter:
    """A finder that finds nothing, and tells what a program has imported of installed modules.

    The program's `own` package is left out: it may read what differs between rollouts.
    """

    def __init__(self, control: int, own: list[str]) -> None:
        self._control, self._own = control, own
        self._known = set(sys.modules)
        self._process = os.getpid()
        self._pipe = os.fstat(control)
        self._next = 0.0

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if time.monotonic() >= self._next:
            self.report()

    def report(self) -> None:
        """Tell of the modules since the last report, in the order in which their imports began."""
        self._next = inf
        found = {}
        for name, module in list(sys.modules.items()):
            if name not in self._known:
                self._known.add(name)
                spec: Any = getattr(module, "__spec__", None)
                file = getattr(spec, "origin", None)
                if file and spec.name == name and self._is_shared(name, file):
                    found[name] = file
        if found and os.getpid() == self._process and self._is_open():
            tell(self._control, {"modules": found})
        self._next = time.monotonic() + REPORT_SECONDS

    def _is_shared(self, name: str, file: str) -> bool:
        own = name.partition(".")[0] in self._own
        return not own and any(folder in file for folder in INSTALLED)

    def _is_open(self) -> bool:
        """Return whether the pipe is still there: the program may have closed it."""
        try:
            return os.path.samestat(os.fstat(self._control), self._pipe)
        except OSError:
            return False


if __name__ == "__main__":
    main()
