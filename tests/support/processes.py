"""Processes: commands whose imports are done, waiting for others, and ports for them.

`Warm` stands for `subprocess.Popen` of `python -m` or `python -c`. The process is the fork of one
that has imported what the command imports, in its own working folder, environment, streams, session
and process group. What an interpreter reads at its own start is that of the process that is forked.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from subprocess import PIPE, CompletedProcess, Popen, TimeoutExpired
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
CLI = (
    *("ratchet.flows.cli.main", "ratchet.flows.cli.commands", "ratchet.flows.recipe.loading"),
    *("ratchet.tasks.reports.board.runs", "ratchet.tasks.recording.queries", "typer.rich_utils"),
)
ENGINE = (sys.executable, "-P", "-m", "ratchet.engine")
"""First words of the command by which an engine of a run is started."""
READ_BY_IMPORTS = ("HF_HOME", "OMP_NUM_THREADS")


class Warm(Popen[Any]):
    """A process of a command of Ratchet, whose parent is the process that was forked."""

    modules = CLI
    variables: tuple[tuple[str, str], ...] = ()
    """Those that the imports read, beside this process's."""
    _end: socket.socket | None = None
    """What says how it has ended."""

    def _execute_child(self, *given: Any) -> None:
        args, cwd, env, pipes = given[0], given[5], given[6], given[10:16]
        fds = [own if pipe < 0 else pipe for own, pipe in enumerate(pipes[::2][:1] + pipes[3::2])]
        request = {"words": [*map(str, args[1:])], "folder": str(cwd or Path.cwd())}
        request |= {"variables": dict(os.environ if env is None else env)}
        request |= {"session": given[21], "group": given[22]}
        self._end, theirs = socket.socketpair()
        socket.send_fds(
            server(self.modules, self.variables),
            [json.dumps(request).encode()],
            [*fds, theirs.fileno()],
        )
        theirs.close()
        self.pid = int.from_bytes(self._end.recv(4))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._end is None:
            return super()._try_wait(flags)  # type: ignore[misc]
        if flags and not select([self._end], [], [], 0)[0]:
            return 0, 0
        return self.pid, int.from_bytes(self._end.recv(4))

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._end is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc]
        with suppress(TimeoutExpired):
            self.wait(0)
        return self.returncode


class WarmEngine(Warm):
    """A process that is warm if it is one of the engine, and starts as usual otherwise."""

    modules = ("ratchet.engine.api.server", "transformers.models.qwen3.modeling_qwen3")

    def _execute_child(self, *given: Any) -> None:
        args, env = given[0], given[6] or os.environ
        if (*args,)[: len(ENGINE)] == ENGINE and all(
            env.get(name) == os.environ.get(name) for name in READ_BY_IMPORTS
        ):
            return super()._execute_child(args[1:], *given[1:])
        return Popen._execute_child(self, *given)  # type: ignore[attr-defined]


def run(words: Sequence[str], **given: Any) -> CompletedProcess[str]:
    """Run Python with such words to its end; return what it has printed."""
    ends = {"stdout": PIPE, "stderr": PIPE, "text": True}
    with Warm([sys.executable, *words], **ends, **given) as process:
        out, err = process.communicate(timeout=120)
    return CompletedProcess(words, process.returncode, out, err)


def free_port() -> int:
    """Return a port on which nobody listens, and which the kernel gives nobody by itself."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 50):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("all of 50 ports are in use")


def wait_until(what: str, happened: Callable[[], bool], seconds: float = 60) -> float:
    """Wait until something has happened; return for how long."""
    started = time.monotonic()
    while not happened():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - started


@cache
def server(modules: tuple[str, ...], variables: tuple[tuple[str, str], ...] = ()) -> socket.socket:
    """Start the process that is forked, and return the socket by which it is asked."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", __file__, str(theirs.fileno()), *modules]
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **one_thread, **dict(variables)})
    theirs.close()
    return ours


def main() -> None:
    """Import the modules, and become each command that is asked for in a fork."""
    channel, ends = socket.socket(fileno=int(sys.argv[1])), dict[int, tuple[int, int]]()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    assert threading.active_count() == 1, "a fork would lack the other threads"
    while True:
        ready, _, _ = select([channel.fileno(), *ends], [], [])
        for ended in ends.keys() & ready:
            child, end = ends.pop(ended)
            with suppress(BrokenPipeError):  # who asked for it has died
                os.write(end, os.waitpid(child, 0)[1].to_bytes(4))
            os.close(end)
            os.close(ended)
        if channel.fileno() in ready:
            text, fds, *_ = socket.recv_fds(channel, 2**20, 4)
            if not text:
                return
            *streams, end = fds
            if (child := os.fork()) == 0:
                break
            ends[os.pidfd_open(child)] = child, end
            os.write(end, child.to_bytes(4))
            for fd in streams:
                os.close(fd)
    for own, fd in enumerate(streams):
        os.dup2(fd, own)
    for fd in (channel.detach(), *fds, *ends, *(end for _, end in ends.values())):
        os.close(fd)
    become(**json.loads(text))


def become(
    words: list[str], folder: str, variables: dict[str, str], session: bool, group: int
) -> None:
    """Run `-m MODULE` or `-c PROGRAM` with its arguments, as the interpreter does."""
    if session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    show_command([sys.executable, *words])
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = ["", *variables.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    how, what, *sys.argv[1:] = words
    sys.argv[0] = how
    if how == "-m":
        if not hasattr(sys.modules.get(what), "__path__"):
            sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), module.__dict__)


def show_command(words: Sequence[str]) -> None:
    """Have the lists of processes show these words, as far as there is space for them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    shown = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
