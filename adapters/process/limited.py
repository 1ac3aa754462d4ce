"""A child process that answers questions one at a time, and that the system stops at its limits.

It is for what a user's few lines can make endless or huge, such as a schema or a query: no thread
can be stopped, and no library holds its own limits in every function.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from select import POLLIN, poll
from threading import Lock
from typing import Any

from adapters.process.children import keep_from_children
from adapters.process.running_clock import running_clock

LONGEST_WAIT = 60.0
"""Bound on the time until an answer, in seconds of this process, for a child that does not run."""
LOOK_SECONDS = 1.0


class LimitMet(Exception):
    """The end of a child by a question: its exit status, which is negative if a signal ended it."""

    def __init__(self, status: int, took: str) -> None:
        super().__init__(f"ended with status {status}")
        self.took = took
        """What the question took more of."""


class LimitedChild:
    """A child that runs a module of ours, by `answer_questions` and with so many bytes of memory.

    The process starts with the first question and after each death, and ends with its input.
    """

    def __init__(self, module: str, memory: int) -> None:
        self._memory = memory
        self._command = [sys.executable, "-P", "-m", module]
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = Lock()

    def ask(self, question: object, seconds: float) -> Any:
        """Return the answer to a question; LimitMet if it takes more processor time, or memory."""
        with self._asking:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps([seconds, question]).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # there is no answer to read either
            until, waited = running_clock().seconds() + LONGEST_WAIT, False
            answered = poll()  # unlike select(), for descriptors of any number
            answered.register(process.stdout, POLLIN)
            while not answered.poll(1000 * LOOK_SECONDS):
                if waited := running_clock().seconds() > until:
                    process.kill()
            if answer := process.stdout.readline():
                return json.loads(answer)
            self._process = None
            process.communicate()
            took = f"{self._memory >> 20} MiB of memory"
            if process.returncode == -signal.SIGPROF:
                took = f"{seconds:g} s of processor time"
            raise LimitMet(process.returncode, f"{LONGEST_WAIT:g} s" if waited else took)

    def close(self) -> None:
        """Wait for the question under way, and end the process."""
        with self._asking:
            process, self._process = self._process, None
            if process is not None:
                process.kill()  # it may be stopped, and would not see the end of its stdin
                process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not reach it: it ends with its stdin
        )
        assert process.stdin is not None
        keep_from_children(process.stdin)
        return process


def answer_questions(answer: Callable[[Any], object], memory: int) -> None:
    """Answer each question of a parent, in this process, which may use so many bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        seconds, question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
        answered = json.dumps(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answered, flush=True)  # noqa: T201
