"""The files that a child forked by an agent must not keep open: locks, journals, engine pipes.

A program that is started anew has none of them, since Python closes its files at `exec`. A child
that only forks would keep the lock of a run whose own process died, and keep its engine alive.
"""

import os
from typing import IO
from weakref import WeakSet

_ours: "WeakSet[IO[bytes] | IO[str]]" = WeakSet()


def keep_from_children(file: IO[bytes] | IO[str]) -> None:
    """Point the file to /dev/null in every process that is forked from now on."""
    _ours.add(file)


def _point_to_devnull() -> None:
    # The file object stays usable, since the child's own exit may flush it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in list(_ours):
        if not file.closed:
            os.dup2(nowhere, file.fileno(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_point_to_devnull)
