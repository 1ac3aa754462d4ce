"""Child processes: what a forked one must not keep open, and the end of one with its parent.

A forked child must not keep locks, journals and the pipes of engines open. A program that is
started anew has none of them, since Python closes its files at `exec`. A child that only forks
would keep the lock of a run whose own process died, and keep its engine alive.
"""

import os
import subprocess
from typing import IO
from weakref import WeakSet

_ours: "WeakSet[IO[bytes] | IO[str]]" = WeakSet()


def keep_from_children(file: IO[bytes] | IO[str]) -> None:
    """Point the file to /dev/null in every process that is forked from now on."""
    _ours.add(file)


def end_with_this_process(child: int) -> "subprocess.Popen[bytes]":
    """Have a child process killed when this process ends, whatever ends it.

    A shell waits for the end of its input, which only this process has open. It is to be kept as
    long as the child is.
    """
    command = ["/bin/sh", "-c", 'read _; kill -9 "$0" 2>/dev/null', str(child)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    keep_from_children(watcher.stdin)
    return watcher


def _point_to_devnull() -> None:
    # The file object stays usable, since the child's own exit may flush it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in list(_ours):
        if not file.closed:
            os.dup2(nowhere, file.fileno(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_point_to_devnull)
