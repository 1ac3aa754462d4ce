"""A program that is run to its end, while its progress and its memory are told."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, TypeAlias

import psutil

from adapters.process.children import end_with_this_process, has_ended

LOOK_SECONDS = 0.1
TAIL_BYTES = 4096
"""End of what a program says, in which its newest bar stands."""

BAR = re.compile(r"\d+%\|[^|\r\n]*\| (\d+)/(\d+)")
"""A bar as tqdm draws it: what is done, of how much."""

ERRNO = re.compile(r"(?:Errno|os error) (\d+)")

Tell: TypeAlias = Callable[[float | None, int], None]
"""Function that takes the share that is done, if it is known, and the bytes of memory in use."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended: its exit status and what it said."""

    status: int
    stdout: str
    stderr: str

    def last_line(self) -> str:
        """Return the last line of its log, or else how it was ended."""
        said = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        if self.status < 0:
            return f"it was ended by signal {-self.status}"
        return said[-1] if said else f"it ended with status {self.status}"

    def errno(self) -> int | None:
        """Return the number of the system's error that it ended with, if its last line has one."""
        found = ERRNO.search(self.last_line())
        return int(found[1]) if found else None


def run_watched(
    command: Sequence[str],
    tell: Tell,
    share: Callable[[], float] | None = None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program; `share` measures what it has done, which else its own bars say.

    It is killed when this process ends, or leaves the block by an error.
    """
    with TemporaryFile() as out, TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=env and {**env}
        )
        end_with_this_process(process.pid)
        try:
            while process.poll() is None:
                with suppress(psutil.Error):  # it may just have ended
                    memory = psutil.Process(process.pid).memory_info().rss
                    tell(share() if share else _share_of_bar(log), memory)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
        finally:
            process.kill()
            process.wait()
            has_ended(process.pid)
        return Ended(process.returncode, _read(out), _read(log))


def _share_of_bar(log: IO[bytes]) -> float | None:
    """Return the share that the newest bar in a program's log shows, if there is one."""
    descriptor = log.fileno()
    end = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, TAIL_BYTES, max(0, end - TAIL_BYTES)).decode(errors="replace")
    bars = BAR.findall(tail)
    return int(bars[-1][0]) / max(1, int(bars[-1][1])) if bars else None


def _read(file: IO[bytes]) -> str:
    """Read what a program wrote, whose place in the file is the program's own."""
    descriptor = file.fileno()
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
