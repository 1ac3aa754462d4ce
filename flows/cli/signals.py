"""The end of a command by Ctrl-C or SIGTERM: in seconds, in one line, with nothing left running."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import psutil

from adapters.errors import UserError

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command."""

GRACE_SECONDS = 3.0
"""Time in which a stopped command closes what it has open. Then its processes are killed, as in a
crash, which costs nothing: what is done is on disk."""

SAYING_SECONDS = 1.0
"""Time in which a stopped command says where it was; its terminal may take nothing."""

_received: list[int] = []
"""Signals that have come; the first one counts."""

_explanations: list[Callable[[], str]] = []
"""What a stopped block says of itself; the innermost block's is printed."""

_settled = threading.Event()
"""Set when Stopped was raised or the block is over: Stopped is raised once, and only there."""

_leaving = threading.Lock()


class Stopped(KeyboardInterrupt):
    """Order of a signal to the main thread to end its work."""


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """End the process if SIGINT or SIGTERM comes in the block: status 128 + the signal's number.

    The signal raises Stopped in the main thread, or ends the process at once if that imports a
    module. Another thread limits the time that this takes, since the main thread may wait for
    something that does not come.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    before = {number: signal.getsignal(number) for number in ENDING}
    # Python writes the number of a signal here first, also if a library has replaced its handler.
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # a background job ignores SIGINT
            signal.signal(number, _stop)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_limit, args=(reading,), daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        yield
    finally:
        _settled.set()
        _received.extend(_arrived(reading))
        if _received:
            _leave()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        writing.close()  # which ends the thread


@contextmanager
def explaining(explain: Callable[[], str]) -> Iterator[None]:
    """Have `explain` say, if the block is stopped, where it was and how it goes on."""
    _explanations.append(explain)
    yield
    _explanations.pop()  # not after an error: the explanation is printed when the command has ended


def _stop(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if not _settled.is_set():
        _settled.set()
        _silence()
        if _is_importing(frame):
            _leave()
        raise Stopped


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether an import is under way; an exception in it can abort an extension module."""
    while frame is not None and frame.f_globals.get("__name__") != "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None


def _forget() -> None:
    """Give a process that is forked the signals' usual effects, and no share of the socket."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _arrived(signals: socket.socket) -> list[int]:
    """List the ending signals that wait in the socket, where they stay.

    A library may turn what a signal's handler raises into an error of its own, which can arrive
    before the thread that waits for the socket has run.
    """
    with suppress(BlockingIOError):
        numbers = signals.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return [number for number in numbers if number in ENDING]
    return []


def _limit(signals: socket.socket) -> None:
    """Wait for a signal, silence what fails because of it, and end the process in time."""
    with signals:
        while number := signals.recv(1, socket.MSG_PEEK):
            if number[0] in ENDING:
                _received.append(number[0])
                _silence()
                time.sleep(GRACE_SECONDS)
                _leave()
            signals.recv(1)


def _silence() -> None:
    logging.disable(sys.maxsize)
    threading.excepthook = sys.unraisablehook = lambda _: None


def _leave() -> NoReturn:
    """Say what was stopped, and end this process and its children."""
    _leaving.acquire(timeout=2 * SAYING_SECONDS)  # a signal may interrupt whoever has it
    _silence()
    saying = threading.Thread(target=_say, daemon=True)
    saying.start()
    saying.join(SAYING_SECONDS)
    _kill_children()
    os._exit(128 + _received[0])


def _say() -> None:
    """Print what was stopped in a line."""
    said = "stopped"
    with suppress(UserError, OSError):  # its files may be damaged
        said = _explanations[-1]() if _explanations else said
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
    with suppress(OSError):
        print(f"ratchet: {said}", file=sys.stderr, flush=True)


def _kill_children() -> None:
    """Kill the children of this process, and those that a thread starts meanwhile."""
    this, killed = psutil.Process(), set[psutil.Process]()
    while children := {*this.children(recursive=True)} - killed:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        killed |= children
