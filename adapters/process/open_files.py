"""Files and connections that a process may have open at a time; each is a descriptor.

A shell of macOS allows a process 256 of them, and most of Linux 1,024, far less than can be had.
"""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from traceback import clear_frames

from ratchet.adapters.errors import UserError

LIMIT = resource.RLIMIT_NOFILE

HIGHEST_OF_MACOS = 10_240
"""Limit that macOS grants where it names no limit."""

USERS = "RATCHET_OPEN_FILES"
"""Variable that tells the processes of Ratchet's the limit that the user had before."""

RESERVED = 48
"""Descriptors for what else is opened while rollouts are played: files, pipes, Prefect's client."""

PER_ROLLOUT = 6
"""Descriptors of a rollout: both ends of its connection to the door, one to the service that
answers it, and the pipes of a program or a connection to another model."""

OUT = {errno.EMFILE, errno.ENFILE}

FILES_REMEDY = "raise the limit of open files (`ulimit -n`, up to `ulimit -Hn`)"


class OutOfFiles(UserError):
    """An error for a process that can open no further file or connection."""


def raise_limit() -> None:
    """Raise the limit of this process and its children as far as the system allows.

    An agent's programs get back the limit that the user had: a process that calls `select` fails
    where a descriptor is above 1,023.
    """
    soft, hard = resource.getrlimit(LIMIT)
    os.environ.setdefault(USERS, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    for wanted in (hard, HIGHEST_OF_MACOS):
        try:
            resource.setrlimit(LIMIT, (wanted, hard))
        except (ValueError, OSError):  # macOS, for an endless limit
            continue
        return


def users_limit() -> str:
    """Return the limit that the user had, as a shell's `ulimit -n` takes it."""
    return os.environ.get(USERS) or str(resource.getrlimit(LIMIT)[0])


def most_rollouts() -> int:
    """Return how many rollouts can be played at a time with the descriptors that are left.

    OutOfFiles if there are too few for any.
    """
    limit, opened = _limit_and_opened()
    most = (limit - opened - RESERVED) // PER_ROLLOUT
    if most < 1:
        raise OutOfFiles(
            f"no rollout can be played: this process may have {limit} files open, has {opened}, "
            f"and needs {RESERVED + PER_ROLLOUT} more; {FILES_REMEDY}"
        )
    return most


def _limit_and_opened() -> tuple[int, int]:
    return resource.getrlimit(LIMIT)[0], sum(1 for _ in Path("/dev/fd").iterdir())


def check_files_after(error: BaseException) -> None:
    """Raise OutOfFiles if an agent's error comes from this process's lack of files.

    An error of the same number may be of a program that the agent asked, or of the agent's own
    files, which are closed with its frames: then enough are left.
    """
    for cause in _causes(error):
        clear_frames(cause.__traceback__)
    with suppress(OSError):  # of this look, for which nothing is left
        limit, opened = _limit_and_opened()
        if limit - opened > RESERVED:
            return
    check_files(error)


def check_files(error: BaseException) -> None:
    """Raise OutOfFiles if an error comes from this process's having too many files open."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in OUT:
            limit, _ = resource.getrlimit(LIMIT)
            raise OutOfFiles(
                f"this process has all of its {limit} files and connections open "
                f"({cause.strerror}); {FILES_REMEDY}, give a smaller rollouts.concurrency, or see "
                "what leaves files open"
            ) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    left, seen = [error], set[int]()
    while left:
        cause = left.pop()
        if id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            of_group = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
            left += [one for one in (cause.__cause__, cause.__context__, *of_group) if one]
