"""Programs that run in a place, within its bounds and, if the recipe says so, in a cage.

The cage is bubblewrap, with the place as the only folder that the program can write. It has no
network. `first_process.py` makes the socket on which the program finds the door, and hands it out
of the cage, where each connection is passed on to the door, with a descriptor of the cage's process
1, by which this process ends all that is in the cage.
"""

import asyncio
import ctypes
import json
import logging
import os
import platform
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from errno import EPERM
from functools import cache
from pathlib import Path
from signal import SIGKILL
from urllib.parse import SplitResult, urlsplit

from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.clients.libraries import tls
from ratchet.adapters.errors import UserError
from ratchet.adapters.places.bounds import BLOCK, MIB, PROCESSES, check_files, held_to_bounds
from ratchet.adapters.places.place import (
    CAGED,
    CAGED_PORT,
    HOME,
    REPORTS,
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
    *("ca-certificates", "mime.types", "protocols", "services", "hosts", "pki/ca-trust"),
    *("ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "ssl/ca-bundle.pem", "pki/tls/certs"),
    *("pki/tls/cert.pem", "pki/tls/openssl.cnf"),
)
"""Files and folders of /etc that a caged program may read: none has private keys."""

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

KILL_SECONDS = 60.0
"""Time in which all processes of a cage must end once its process 1 is killed."""

REFUSED_CALLS = {
    "x86_64": (0xC000003E, (101, 310, 311, 438, 248, 249, 250, 103)),
    "aarch64": (0xC00000B7, (117, 270, 271, 438, 217, 218, 219, 116)),
}
"""Machines, as seccomp numbers them, and calls that a cage refuses: those into other processes
(ptrace, process_vm_readv, process_vm_writev, pidfd_getfd), to the user's keys (add_key,
request_key, keyctl) and to the kernel's log (syslog)."""

OTHER_CALLS = 2**30
"""Number from which calls are x32's, which has others for the same."""

MOST_CONNECTIONS = 32
"""Connections of a cage that are passed on at a time; further ones wait in its kernel's queue."""

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


def refuse_calls(machine: str) -> bytes:
    """Return seccomp's filter that refuses REFUSED_CALLS, and those of 32-bit programs."""
    architecture, calls = REFUSED_CALLS[machine]
    load, equal, least, end = 0x20, 0x15, 0x35, 0x06
    allowed, refused = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x50000 | EPERM)
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), refused, (load, 0, 0, 0)]
    for test, number in [(least, OTHER_CALLS), *((equal, call) for call in calls)]:
        lines += [(test, 0, 1, number), refused]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, allowed])


@asynccontextmanager
async def caged(
    place: Place, words: Sequence[str], variables: Mapping[str, str], line: str, roles: Roles
) -> AsyncIterator[Program]:
    """Start a program in a cage, and pass its connections on to the door of `roles`.

    With the block ends all that is in the cage, whatever the program has made of the cage's own
    processes: the program starts once this process can end them, and their end is awaited.
    """
    door = next((urlsplit(one["base_url"]) for one in roles.values()), None)
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile(buffering=0) as refused:
        options = []
        if (machine := platform.machine()) in REFUSED_CALLS:
            refused.write(refuse_calls(machine))
            refused.seek(0)
            options = ["--seccomp", str(refused.fileno())]
        in_cage = [check_cage(), *APART, *options, *_words(place, words, theirs.fileno(), door)]
        inherited = theirs.fileno(), refused.fileno()
        async with running_program(in_cage, variables, line, inherited=inherited) as program:
            theirs.close()
            handed = await _handed(ours)
            passing = [asyncio.create_task(_pass_on(one, door)) for one in handed[1:] if door]
            try:
                yield program
            finally:
                await cancel_and_wait(*passing)
                if handed:
                    await asyncio.to_thread(_end, handed[0])
        program.began = bool(handed) and not ours.recv(1)  # where a start has failed


async def _handed(channel: socket.socket) -> list[int]:
    """Return the descriptors that a cage hands out, and let its program start.

    There are none if the cage could not be made.
    """
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    handed: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, lambda: handed.done() or handed.set_result(None))
    try:
        await handed
    finally:
        loop.remove_reader(channel)
    descriptors = socket.recv_fds(channel, 1, 2)[1]
    if descriptors:
        channel.send(b".")
    return descriptors


def _end(first: int) -> None:
    """Kill process 1 of a cage, and wait for its end, before which all others have ended."""
    ended = select.poll()
    ended.register(first, select.POLLIN)
    try:
        ctypes.CDLL(None).syscall(424, first, SIGKILL, None, 0)  # pidfd_send_signal
        if not ended.poll(1000 * KILL_SECONDS):
            raise PlaceError(
                f"the processes of a cage have not ended {KILL_SECONDS:g} s after they were "
                "killed; see what holds them, such as a disk that does not answer"
            )
    finally:
        os.close(first)


def _words(place: Place, words: Sequence[str], channel: int, door: SplitResult | None) -> list[str]:
    """Return what bubblewrap shows, and the program; PlaceError if the cage hides that."""
    _check_shown(place, words[0])
    limits = {
        "RLIMIT_FSIZE": place.settings.most_mib * MIB,
        "RLIMIT_DATA": place.settings.most_memory_mib * MIB,
        "RLIMIT_NPROC": place.settings.most_processes,
        "RLIMIT_CORE": 0,
    }
    told = {"channel": channel, "port": CAGED_PORT if door else None, "limits": limits}
    python = [str(Path(sys.executable).resolve()), "-I", "-S", "-c", FIRST_PROCESS.read_text()]
    return [*_shown(place), "--", *python, json.dumps(told), *words]


def _shown(place: Place) -> list[str]:
    """Return the options that say what a caged program sees, and where it begins."""
    options = _readable([*SYSTEM_FOLDERS, *(f"/etc/{name}" for name in SYSTEM_SETTINGS)])
    for name, text in ACCOUNTS.items():
        (file := place.folder / name).write_text(text)
        options += ["--ro-bind", str(file), f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    own = {CAGED / WORK: place.work, CAGED / HOME: place.home, CAGED / TEMPORARY: place.temporary}
    if place.scored.is_dir():
        own |= {CAGED / SCORE: place.scored, CAGED / REPORTS: place.report.parent}
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


async def _pass_on(handed: int, door: SplitResult) -> None:
    """Pass the connections of a socket that a cage has handed out on to the door."""
    secure = tls() if door.scheme == "https" else None
    port = door.port or (443 if secure else 80)
    loop, free = asyncio.get_running_loop(), asyncio.Semaphore(MOST_CONNECTIONS)

    async def connected(connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            out, into = await asyncio.open_connection(door.hostname, port, ssl=secure)
            await asyncio.gather(_copy(reader, into), _copy(out, writer))
        except OSError as error:
            log.warning("a caged program could not reach the door: %s", error)
        finally:
            writer.close()
            free.release()

    with socket.socket(fileno=handed) as listener:
        listener.setblocking(False)
        async with asyncio.TaskGroup() as passing:
            while await free.acquire():
                connection, _ = await loop.sock_accept(listener)
                passing.create_task(connected(connection))


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
        held = caged(place, words, variables, line, roles)
        async with held as program, held_to_bounds(place, program):
            yield program
    else:
        blocks, mark = place.settings.most_mib * MIB // BLOCK, place.folder / NOT_STARTED
        limited = [*LIMITED, str(mark), str(blocks), *words]
        started = running_program(limited, variables, line, folder=place.work, inherited=inherited)
        try:
            async with started as program, held_to_bounds(place, program):
                yield program
                program.began = not mark.exists()
        finally:
            _end_strays(variables["HOME"])
    await asyncio.to_thread(check_files, place, program)


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
