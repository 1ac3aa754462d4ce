"""The cage of a program: bubblewrap, with its place as the only folder that it can write.

The cage has no network. Its first process makes the socket on which the program finds the door, and
hands it out of the cage, where each connection is passed on to the door.
"""

import asyncio
import json
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.clients.libraries import tls
from ratchet.adapters.errors import UserError
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
