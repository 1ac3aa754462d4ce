"""Calls between a process and its child, in both directions, by lines of JSON."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import IO, Any

from adapters.errors import UserError
from adapters.process.event_loop import call_in_thread

log = logging.getLogger(__name__)


class LineCalls:
    """One end of the calls between two processes.

    `answer` answers a call of the other process by the call's name and its argument, in a thread of
    the call's own. A UserError or an OSError of it is raised where the other process waits.
    """

    def __init__(
        self, tell: Callable[[bytes], object], answer: Callable[[str, Any], object]
    ) -> None:
        self._tell = tell
        self._answer = answer
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        self._over: Callable[[], UserError] | None = None
        self._locked = Lock()

    def ask(self, name: str, given: object = None) -> Future[Any]:
        """Call the other process; the future has its answer."""
        asked: Future[Any] = Future()
        asked.set_running_or_notify_cancel()
        with self._locked:
            if self._over is not None:
                asked.set_exception(self._over())
                return asked
            number = next(self._numbers)
            self._asked[number] = asked
            self._write({"number": number, "name": name, "given": given})
        return asked

    def listen(self, lines: Iterable[bytes], ended: Callable[[], UserError]) -> None:
        """Read what the other process says, to its end, which every call then raises."""
        for line in lines:
            said = json.loads(line)
            if "name" in said:
                asked = said["number"], said["name"], said["given"]
                call_in_thread("line call", self._answer_one, *asked)
                continue
            answered = self._asked.pop(said["number"])
            if (failure := said.get("failure")) is None:
                answered.set_result(said["answer"])
            else:
                answered.set_exception(read_error(failure))
        with self._locked:
            self._over = ended
            left, self._asked = [*self._asked.values()], {}
        for asked in left:
            asked.set_exception(ended())

    def _answer_one(self, number: int, name: str, given: object) -> None:
        said: dict[str, object] = {"number": number}
        try:
            said["answer"] = self._answer(name, given)
        except (UserError, OSError) as error:
            said["failure"] = write_error(error)
        except Exception as error:  # without an answer, the other process would wait for ever
            log.error("the call %s of another process failed", name, exc_info=error)
            said["failure"] = write_error(RuntimeError(f"{type(error).__name__}: {error}"))
        with self._locked:
            self._write(said)

    def _write(self, said: object) -> None:
        self._tell(json.dumps(said).encode())


def write_error(error: Exception) -> dict[str, object]:
    """Write an error for another process."""
    code = error.errno if isinstance(error, OSError) else None
    return {"kind": type(error).__name__, "said": str(error), "errno": code}


def read_error(written: dict[str, Any]) -> Exception:
    """Return what was written: an error of the same class, if it is a UserError or has a number."""
    if written["errno"] is not None:
        return OSError(written["errno"], written["said"])
    kinds, left = dict[str, type[UserError]](), [UserError]
    while left:
        kind = left.pop()
        kinds[kind.__name__] = kind
        left += kind.__subclasses__()
    kind = kinds.get(written["kind"])
    return RuntimeError(written["said"]) if kind is None else kind(written["said"])


def take_streams() -> tuple[IO[bytes], Callable[[bytes], None]]:
    """Take this process's stdin, and a function that writes a line to its stdout.

    What a library prints afterwards goes to stderr.
    """
    lines, out = os.fdopen(os.dup(sys.stdin.fileno()), "rb"), os.dup(sys.stdout.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.close(nothing)
    told = os.fdopen(out, "wb")

    def tell(line: bytes) -> None:
        with suppress(BrokenPipeError):  # the parent has ended
            told.write(line + b"\n")
            told.flush()

    return lines, tell
