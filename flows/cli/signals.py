"""The end of a command by Ctrl-C or SIGTERM: in seconds, in one line, with nothing left running."""

import atexit
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import NoReturn

import psutil

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import show

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command."""

GRACE_SECONDS = 3.0
"""Time in which a stopped command closes what it has open. Then its processes are killed, as in a
crash, which costs nothing: what is done is on disk."""

SAYING_SECONDS = 1.0
"""Time in which a stopped command says where it was; its terminal may take nothing."""


class Stopped(KeyboardInterrupt):
    """Order of a signal to the main thread to end its work."""


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """End the process if SIGINT or SIGTERM comes in the block: status 128 + the signal's number.

    The signal raises Stopped in the main thread, unless that imports a module. Another thread ends
    the process, since the main thread may wait for something that does not come.
    """
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    ending = _Ending()
    outer = _current.set(ending)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        yield
    finally:
        ending.close()
        _current.reset(outer)


@contextmanager
def explaining(explain: Callable[[], str]) -> Iterator[None]:
    """Have `explain` say, if the block is stopped, where it was and how it goes on."""
    ending = _current.get()
    explanations = [] if ending is None else ending.explanations
    explanations.append(explain)
    yield
    explanations.pop()  # not after an error: the explanation is printed when the command has ended


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process after the block as soon as its exit functions have run.

    Python would tear down its modules, which takes seconds and in which no signal has a handler.
    The block is the whole of what the process does; SIGINT or SIGTERM after it ends the process
    with its status and a line. An error that is not a SystemExit has Python's own end.
    """
    statuses: list[int] = []

    def leave() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        for status in statuses:
            os._exit(status)

    atexit.register(leave)  # before any other, so it is called last
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_done)
    try:
        yield
        statuses.append(0)
    except SystemExit as ended:
        statuses.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


class _Ending:
    """The handlers of the ending signals, and the thread that ends the process once one comes."""

    def __init__(self) -> None:
        self.explanations: list[Callable[[], str]] = []
        """What a stopped block says of itself; the innermost block's is printed."""
        self._raised = False
        self._closed = threading.Event()
        """Set when there is nothing left that the main thread would close."""
        self._before = {number: signal.getsignal(number) for number in ENDING}
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        # Python writes the number of a signal here first, also if a library replaced its handler.
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:  # a background job ignores SIGINT
                signal.signal(number, self._stop)
        os.register_at_fork(after_in_child=self._forget)
        self._ender = threading.Thread(target=self._end, daemon=True)
        self._ender.start()

    def close(self) -> None:
        """Give the signals the effects that they had before; end the process if one has come."""
        self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._writing.close()
        self._ender.join()  # which reads what has come

    def _stop(self, _: int, frame: FrameType | None) -> None:
        """Raise Stopped, once, unless the main thread imports a module."""
        _silence()
        if _is_importing(frame):
            self._closed.set()
        if not self._closed.is_set() and not self._raised:
            self._raised = True
            raise Stopped

    def _forget(self) -> None:
        """Give a process that is forked the signals' usual effects, and no share of the socket."""
        if self._writing.fileno() >= 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self) -> None:
        """Wait for a signal and then, not for long, for the main thread; end the process."""
        with self._reading as signals:
            while number := signals.recv(1):
                if number[0] in ENDING:
                    _silence()
                    self._closed.wait(GRACE_SECONDS)
                    saying = threading.Thread(target=self._say, daemon=True)
                    saying.start()
                    saying.join(SAYING_SECONDS)
                    _exit(number[0])

    def _say(self) -> None:
        said = "stopped"
        with suppress(UserError, OSError):  # its files may be damaged
            said = self.explanations[-1]() if self.explanations else said
        with suppress(OSError):  # the terminal may be gone
            sys.stdout.flush()
        with suppress(OSError):
            show(f"ratchet: {said}", sys.stderr)


def _exit_done(number: int, _: object) -> NoReturn:
    """End a command whose work is done, while Python closes what is open."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, b"ratchet: stopped when its work was done\n")
    _exit(number)


def _exit(number: int) -> NoReturn:
    """End this process, its children, and those that a thread starts meanwhile."""
    this, killed = psutil.Process(), set[psutil.Process]()
    while children := {*this.children(recursive=True)} - killed:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        killed |= children
    os._exit(128 + number)


_current: ContextVar[_Ending | None] = ContextVar("ending", default=None)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether an import is under way; an exception in it can abort an extension module."""
    while frame is not None and frame.f_globals.get("__name__") != "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None


def _silence() -> None:
    logging.disable(sys.maxsize)
    threading.excepthook = sys.unraisablehook = lambda _: None
