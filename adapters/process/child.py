"""Child processes: each child ends with this process, however it ends, and keeps no file of it.

A program that is started anew has no file of this process, since Python closes them at `exec`. A
child that only forks would keep the lock of a run whose own process died, and keep its engine
alive, so locks, journals and the pipes of other children are taken from it.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from select import POLLIN, poll
from threading import Lock
from typing import IO, Any
from weakref import WeakSet

from ratchet.adapters.process.clock import running_clock

LONGEST_WAIT = 60.0
"""Bound on the time until an answer, in seconds of this process, for a child that does not run."""
CHILD_LOOK_SECONDS = 1.0
_ours: "WeakSet[IO[bytes] | IO[str]]" = WeakSet()


def keep_from_children(file: IO[bytes] | IO[str]) -> None:
    """Point the file to /dev/null in every process that is forked from now on."""
    _ours.add(file)


class ChildProcess:
    """A program that is told lines and answers by lines, and that ends when its stdin does.

    Only this process holds that stdin. Ctrl-C does not reach the program.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env and {**env},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._told, self._answers = self.process.stdin, self.process.stdout
        keep_from_children(self._told)

    def tell(self, line: bytes) -> None:
        """Write a line to the program, unless it has ended or `end` has closed its stdin."""
        with suppress(BrokenPipeError, ValueError):
            self._told.write(line + b"\n")
            self._told.flush()

    def hear(self, seconds: float | None = None) -> bytes | None:
        """Return the program's next line, empty if it has ended; None if it says none in time.

        Time in which this process stood still does not count.
        """
        until = None if seconds is None else running_clock().seconds() + seconds
        answered = poll()  # unlike select(), for descriptors of any number
        answered.register(self._answers, POLLIN)
        while until is not None and not answered.poll(1000 * CHILD_LOOK_SECONDS):
            if running_clock().seconds() > until:
                return None
        return self._answers.readline()

    def take_stderr(self) -> IO[bytes]:
        """Return the program's stderr; its reader closes it, and can read on after `end`."""
        stream, self.process.stderr = self.process.stderr, None
        assert stream is not None
        return stream

    def end(self, seconds: float) -> int:
        """Close the program's stdin, and kill it if it has not ended in time; return its status."""
        with self.process as process:
            with suppress(BrokenPipeError):
                self._told.close()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.returncode


class LimitMet(Exception):
    """The end of a child by a question: its exit status, which is negative if a signal ended it."""

    def __init__(self, status: int, took: str) -> None:
        super().__init__(tell_status(status))
        self.took = took
        """What the question took more of."""


class LimitedChild:
    """A child that runs a module of ours by `answer_questions`, with limited memory.

    It is for what a client's few lines can make endless or huge, such as a schema, since no thread
    can be stopped. The process starts with the first question and after each death.
    """

    def __init__(self, module: str, memory: int) -> None:
        self._memory = memory
        self._command = [sys.executable, "-P", "-m", module]
        self._child: ChildProcess | None = None
        self._asking = Lock()

    def ask(self, question: object, seconds: float) -> Any:
        """Return the answer to a question; LimitMet if it takes more processor time, or memory."""
        with self._asking:
            child = self._child = self._child or ChildProcess(self._command)
            child.tell(json.dumps([seconds, question]).encode())
            answer = child.hear(LONGEST_WAIT)
            if answer:
                return json.loads(answer)
            self._child = None
            status = child.end(0)
            took = f"{self._memory >> 20} MiB of memory"
            if status == -signal.SIGPROF:
                took = f"{seconds:g} s of processor time"
            raise LimitMet(status, f"{LONGEST_WAIT:g} s" if answer is None else took)

    def close(self) -> None:
        """Wait for the question under way, and end the process."""
        with self._asking:
            child, self._child = self._child, None
            if child is not None:
                child.end(0)  # it may be stopped, and would not see the end of its stdin


def answer_questions(answer: Callable[[Any], object], memory: int) -> None:
    """Answer each question of a parent, in this process, which may use `memory` bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        seconds, question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
        answered = json.dumps(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answered, flush=True)  # noqa: T201


def tell_status(status: int) -> str:
    """Say how a process ended, by its exit status, which is negative if a signal ended it."""
    if status >= 0:
        return f"ended with exit status {status}"
    if status == -signal.SIGKILL:
        return "was killed (signal 9)"
    return f"was ended by signal {-status}"


def run_to_end(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program, which is killed when this process ends or leaves this call by an error.

    Its stdout and stderr are the result's.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env and {**env},
        text=True,
        errors="replace",
    ) as process:
        end_with_this_process(process.pid)
        try:
            out, err = process.communicate()
        finally:
            process.kill()
            process.wait()
            has_ended(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, without what surrounds it, or nothing."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()


class _Watcher:
    """Shell that kills what it has been told of when its input ends, which this process holds."""

    SCRIPT = """
        left=" "
        while read -r sign target; do
            case $sign in
                +) left="$left$target " ;;
                -) left="${left%% $target *} ${left#* $target }" ;;
            esac
        done
        for target in $left; do kill -s KILL -- "$target" 2>/dev/null; done
    """

    def __init__(self) -> None:
        self._telling = Lock()
        self._shell: subprocess.Popen[bytes] | None = None

    def tell(self, sign: str, target: int) -> None:
        with self._telling:
            if self._shell is None or self._shell.poll() is not None:
                self._shell = subprocess.Popen(
                    ["/bin/sh", "-c", self.SCRIPT], stdin=subprocess.PIPE, start_new_session=True
                )
            assert self._shell.stdin is not None
            keep_from_children(self._shell.stdin)
            with suppress(BrokenPipeError):
                self._shell.stdin.write(f"{sign} {target}\n".encode())
                self._shell.stdin.flush()


_watcher = _Watcher()


def end_with_this_process(target: int) -> None:
    """Have a child process killed when this process ends, whatever ends it.

    `target` is the child's id or, for all of its process group, the id with a minus.
    """
    _watcher.tell("+", target)


def has_ended(target: int) -> None:
    """Have nothing killed for a target that has ended, since another process may get its id."""
    _watcher.tell("-", target)


def _point_to_devnull() -> None:
    # The file object stays usable, since the child's own exit may flush it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in list(_ours):
        if not file.closed:
            os.dup2(nowhere, file.fileno(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_point_to_devnull)
