"""Programs that run in a place, within its bounds and, if the recipe says so, in a cage.

The cage is bubblewrap, with the place as the only folder that the program can write. It has no
network. Its first process makes the socket on which the program finds the door, and hands it out of
the cage, where each connection is passed on to the door.
"""

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from signal import SIGKILL
from urllib.parse import SplitResult, urlsplit

from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.clients.libraries import tls
from ratchet.adapters.errors import UserError
from ratchet.adapters.places.bounds import BLOCK, PROCESSES, held_to_bounds
from ratchet.adapters.places.place import (
    CAGED,
    CAGED_PORT,
    HOME,
    SCORE,
    TEMPORARY,
    WORK,
    Place,
    PlaceError,
)
from ratchet.adapters.process.event_loop import cancel_and_wait
from ratchet.adapters.process.program import Program, running_program

BUBBLEWRAP = "bwrap"

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/opt", sys.base_prefix)
"""Folders that every caged program may read: the system's, and this Python's."""

SYSTEM_SETTINGS = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "nsswitch.conf", "localtime"),
    *("ssl", "ca-certificates", "pki", "mime.types", "protocols", "services", "hosts"),
)
"""Files and folders of /etc that a caged program may read."""

CAGED_USER = 1000
"""User and group of a caged program, as it sees them."""

ACCOUNTS = {
    "passwd": f"rollout:x:{CAGED_USER}:{CAGED_USER}::{CAGED / HOME}:/bin/sh\n",
    "group": f"rollout:x:{CAGED_USER}:\n",
}
"""Files of /etc that a cage has of its own, by which a program finds its user's name."""

APART = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
    *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--uid", str(CAGED_USER), "--gid", str(CAGED_USER), "--hostname", "rollout"),
)
"""Options by which a cage shares nothing with the machine and has no rights in it."""

FIRST_PROCESS = Path(__file__).with_name("first_process.py")

STARTS = b"+"
"""Last word of a cage that has started its program; another one follows if that failed."""

PASSED_ON = 2**16
"""Bytes of a connection that are passed on at once."""


log = logging.getLogger(__name__)


class NoCage(UserError):
    """An error for a cage that this machine cannot make."""


@cache
def check_cage() -> str:
    """Return the path of bubblewrap; NoCage if it is missing, or cannot make a cage here."""
    found = shutil.which(BUBBLEWRAP)
    if found is None:
        raise NoCage(
            f"place.cage {BUBBLEWRAP}: there is no program {BUBBLEWRAP}; install the system's "
            "package bubblewrap, or give place.cage none"
        )
    words = [found, *APART, "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(words, capture_output=True, text=True)
    if tried.returncode:
        raise NoCage(
            f"place.cage {BUBBLEWRAP}: it cannot make a cage here ({tried.stderr.strip()}); allow "
            "user namespaces to this user, or give place.cage none"
        )
    return found


def has_begun(channel: socket.socket) -> bool:
    """Return whether the program of a cage that has ended was started."""
    said = b""
    with suppress(BlockingIOError):  # the other end is open in this process
        while more := channel.recv(1, socket.MSG_DONTWAIT):
            said += more
    return said.endswith(STARTS)


@asynccontextmanager
async def caged(
    place: Place, words: Sequence[str], roles: Roles
) -> AsyncIterator[tuple[list[str], socket.socket, socket.socket]]:
    """Yield the words of a program in a cage, our end of a socket, and the end that it inherits.

    Connections to the door of `roles` are passed on until the block ends.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        door = next((urlsplit(one["base_url"]) for one in roles.values()), None)
        handed = asyncio.create_task(_pass_on(ours, door)) if door else None
        try:
            yield _words(place, words, theirs.fileno(), door), ours, theirs
        finally:
            if handed is not None:
                await cancel_and_wait(handed)


def _words(place: Place, words: Sequence[str], channel: int, door: SplitResult | None) -> list[str]:
    """Return the words by which bubblewrap starts a program; PlaceError if the cage hides it."""
    _check_shown(place, words[0])
    bounds = place.settings.bounds
    limits = {
        "RLIMIT_FSIZE": bounds.most_bytes,
        "RLIMIT_DATA": bounds.most_memory,
        "RLIMIT_NPROC": bounds.most_processes,
        "RLIMIT_CORE": 0,
    }
    told = {"channel": channel, "port": CAGED_PORT if door else None, "limits": limits}
    python = [str(Path(sys.executable).resolve()), "-I", "-S", "-c", FIRST_PROCESS.read_text()]
    return [check_cage(), *APART, *_shown(place), "--", *python, json.dumps(told), *words]


def _shown(place: Place) -> list[str]:
    """Return the options that say what a caged program sees, and where it begins."""
    options = _readable([*SYSTEM_FOLDERS, *(f"/etc/{name}" for name in SYSTEM_SETTINGS)])
    for name, text in ACCOUNTS.items():
        (file := place.folder / name).write_text(text)
        options += ["--ro-bind", str(file), f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    own = {CAGED / WORK: place.work, CAGED / HOME: place.home, CAGED / TEMPORARY: place.temporary}
    if place.scored.is_dir():
        own[CAGED / SCORE] = place.scored
    for shown, path in {**own, "/tmp": place.temporary, "/dev/shm": place.temporary}.items():
        options += ["--bind", str(path), str(shown)]
    options += _readable(_reads(place))  # they may lie below /tmp
    for folder in ("/proc", "/dev", "/"):  # root itself could set the system's values below /proc
        options += ["--remount-ro", folder]
    return [*options, "--chdir", str(CAGED / WORK)]


def _readable(paths: Sequence[str]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind-try", path, path)]


def _reads(place: Place) -> list[str]:
    return [str(Path(folder).expanduser().absolute()) for folder in place.settings.reads]


def _check_shown(place: Place, program: str) -> None:
    path = shutil.which(program)
    if path is None or Path(path).is_relative_to(place.folder):
        return
    shown = (*SYSTEM_FOLDERS, *_reads(place))
    for link in (Path(path).absolute(), Path(path).resolve()):
        if not any(link.is_relative_to(folder) for folder in shown):
            raise PlaceError(
                f"the cage does not show {link}; add a folder that holds it to place.reads"
            )


async def _pass_on(channel: socket.socket, door: SplitResult) -> None:
    """Take the socket that a cage hands out, and pass its connections on to the door."""
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    handed: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, lambda: handed.done() or handed.set_result(None))
    try:
        await handed
    finally:
        loop.remove_reader(channel)
    _, (*descriptors,), _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:  # the program ended before it had the socket
        return

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        secure = tls() if door.scheme == "https" else None
        port = door.port or (443 if secure else 80)
        try:
            out, into = await asyncio.open_connection(door.hostname, port, ssl=secure)
            await asyncio.gather(_copy(reader, into), _copy(out, writer))
        except OSError as error:
            log.warning("a caged program could not reach the door: %s", error)
        finally:
            writer.close()

    listener = socket.socket(fileno=descriptors[0])
    async with await asyncio.start_server(connected, sock=listener) as server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, until its end; then end the other side."""
    try:
        while data := await reader.read(PASSED_ON):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


MARKED_END = """trap ': > "$0"' EXIT; shopt -s execfail 2>/dev/null"""
LIMITED = ("/bin/sh", "-c", f'{MARKED_END}; ulimit -f "$1" && shift && exec "$@"')
"""Words before a file, the most blocks of a file, and a program's own words.

The first file is made if the program cannot be started: any exit status may be the program's own.
Without execfail, which other shells do not know, bash would not come to its trap.
"""

NOT_STARTED = "not-started"
"""Name of that file in a place."""


@asynccontextmanager
async def program_in(
    place: Place,
    words: Sequence[str],
    variables: Mapping[str, str],
    line: str,
    roles: Roles,
    inherited: Collection[int] = (),
) -> AsyncIterator[Program]:
    """Start a program in a place, with `line` on its stdin; the program ends with the block.

    It reaches the door of `roles`. Raises BeyondBounds if it goes beyond the bounds of the place.
    `began` is known after the block, which waits for its end. `inherited` are descriptors of a
    program without a cage.
    """
    if place.settings.caged:
        async with caged(place, words, roles) as (in_cage, ours, theirs):
            started = running_program(in_cage, variables, line, inherited=(theirs.fileno(),))
            async with started as program, held_to_bounds(place, program):
                yield program
                program.began = has_begun(ours)
        return
    blocks, mark = str(place.settings.bounds.most_bytes // BLOCK), place.folder / NOT_STARTED
    limited = [*LIMITED, str(mark), blocks, *words]
    started = running_program(limited, variables, line, folder=place.work, inherited=inherited)
    try:
        async with started as program, held_to_bounds(place, program):
            yield program
            program.began = not mark.exists()
    finally:
        _end_strays(variables["HOME"])


def _end_strays(home: str) -> None:
    """Kill what has left a program's process group and still has its HOME.

    A process in a cage cannot outlive it.
    """
    mark = b"\0HOME=" + os.fsencode(home) + b"\0"
    with suppress(FileNotFoundError):  # a system without /proc
        for entry in os.scandir(PROCESSES):
            if entry.name.isdecimal():
                with suppress(OSError):
                    if mark in b"\0" + Path(entry.path, "environ").read_bytes():
                        os.kill(int(entry.name), SIGKILL)
