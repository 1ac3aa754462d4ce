"""The programs of doors, which may be started before their run is open, to load meanwhile."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.process.child import ChildProcess

PROGRAM = "tasks.doors.program"

_begun: list[ChildProcess] = []
"""Programs that no door has taken."""


@contextmanager
def doors_begun(number: int) -> Iterator[None]:
    """Start the programs of the doors that this block will open, so that they load now."""
    begun = [_start() for _ in range(number)]
    _begun.extend(begun)
    try:
        yield
    finally:
        for spare in [one for one in begun if one in _begun]:
            _begun.remove(spare)
            spare.end(0)  # it may load for seconds yet


def take_program() -> ChildProcess:
    """Return a program that was begun, or start one."""
    try:
        return _begun.pop(0)
    except IndexError:
        return _start()


def _start() -> ChildProcess:
    return ChildProcess([sys.executable, "-P", "-m", PROGRAM])
