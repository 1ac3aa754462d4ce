"""Owners of a run: the processes that had it open, one after the other, in owners.jsonl.

A lock keeps a second process out, where the file system has locks. Where it has no locks, or
somebody removed the lock or copied the folder, the log of owners tells: each process that opens the
run is its next owner, and whoever is no longer the last stops at its next write.
"""

import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from ratchet.adapters.errors import UserError
from ratchet.tasks.storage.files import JsonRow
from ratchet.tasks.storage.logs import FollowedLog, follow


@dataclass(frozen=True)
class Owner:
    """Process that opened a run. `epoch` counts the owners of the run so far, this one included.

    `id` is random, so that no two owners are equal, not even the owners of two copies of a run.
    """

    epoch: int
    id: str
    host: str
    process: int
    folder: str
    opened: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, in {self.folder}, at {self.opened}"


class Ownership:
    """Ownership of a run by this process."""

    def __init__(self, log: Path, owner: Owner) -> None:
        self.owner = owner
        self._log = log

    def check(self) -> None:
        """Raise UserError if another process has opened the run since."""
        last = last_owner(self._log)
        if last != self.owner:
            by = f"by {last}" if last else f"by nobody that {self._log} names"
            raise UserError(
                f"the run {self._log.parent} was taken over {by}: this process "
                f"({os.getpid()}) writes nothing more to it. Let that one go on, or end it and "
                "resume the run"
            )

    def earlier(self) -> list[Owner]:
        """List the earlier owners that had the run open here, and not a copy of it elsewhere."""
        owners = _owners(self._log).ask(lambda rows: [Owner(**row) for row in rows])
        here = self.owner.host, self.owner.folder
        return [one for one in owners if (one.host, one.folder) == here and one != self.owner]


def last_owner(log: Path) -> Owner | None:
    """Return the process that opened a run last."""
    last = _owners(log).ask(lambda rows: rows[-1:])
    return Owner(**last[0]) if last else None


def read_openings(log: Path) -> list[str]:
    """Return when processes have opened a run, to the second."""
    return _owners(log).ask(lambda rows: [row["opened"] for row in rows])


def take_over(log: Path) -> Ownership:
    """Make this process the owner of the run that has this log of owners."""
    last = last_owner(log)
    owner = Owner(
        epoch=1 if last is None else last.epoch + 1,
        id=token_hex(3),
        host=socket.gethostname(),
        process=os.getpid(),
        folder=str(log.parent.resolve()),
        opened=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    )
    _owners(log).append(asdict(owner))
    return Ownership(log, owner)


def _owners(log: Path) -> FollowedLog[list[JsonRow]]:
    return follow(log, list[JsonRow])
