"""Child processes: what a forked one must not keep open, and the end of one with its parent.

A forked child must not keep locks, journals and the pipes of engines open. A program that is
started anew has none of them, since Python closes its files at `exec`. A child that only forks
would keep the lock of a run whose own process died, and keep its engine alive.
"""

import os
import subprocess
from contextlib import suppress
from threading import Lock
from typing import IO
from weakref import WeakSet

_ours: "WeakSet[IO[bytes] | IO[str]]" = WeakSet()


def keep_from_children(file: IO[bytes] | IO[str]) -> None:
    """Point the file to /dev/null in every process that is forked from now on."""
    _ours.add(file)


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
    """Have nothing killed for a target that has ended, whose id may be another process's next."""
    _watcher.tell("-", target)


def _point_to_devnull() -> None:
    # The file object stays usable, since the child's own exit may flush it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in list(_ours):
        if not file.closed:
            os.dup2(nowhere, file.fileno(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_point_to_devnull)
