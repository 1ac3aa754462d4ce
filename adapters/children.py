"""What a child that an agent forks must not hold: our locks, our journals, the engine's lifeline.

A program that is started anew has none of them, since Python closes its files at `exec`. A child
that only forks would keep the lock of a run whose own process died, and keep its engine alive.
"""

import os
from typing import IO, Any
from weakref import WeakSet

_ours: WeakSet[IO[Any]] = WeakSet()


def keep_from_children(file: IO[Any]) -> None:
    """In any process that is forked from now on, `file` leads nowhere."""
    _ours.add(file)


def _let_go() -> None:
    """The file object stays usable, since the child's own exit may flush it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in list(_ours):
        if not file.closed:
            os.dup2(nowhere, file.fileno(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_let_go)
