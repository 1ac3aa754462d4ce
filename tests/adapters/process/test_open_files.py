"""The limit of open files: raised for Ratchet, the user's own for programs, and never exceeded."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from ratchet.adapters.process.open_files import (
    HIGHEST_OF_MACOS,
    LIMIT,
    PER_ROLLOUT,
    RESERVED,
    USERS,
    OutOfFiles,
    check_files,
    most_rollouts,
    raise_limit,
)
from ratchet.adapters.process.program import Program, running_program
from tests.support.processes import ROOT

LIMITED = 'ulimit -S -n 200; ulimit -H -n 400; exec "$@"'
RAISED = """
import asyncio, os, resource
import ratchet.flows
from ratchet.adapters.process.program import Program, running_program
from ratchet.adapters.process.open_files import most_rollouts

async def limit():
    async with running_program(["/bin/sh", "-c", "ulimit -n"], os.environ, "") as program:
        await program.silent.wait()
    return program.stdout.last_json()[0]

print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], asyncio.run(limit()), most_rollouts())
"""


def test_the_limit_is_raised_for_this_process_and_not_for_an_agent_s_program() -> None:
    command = ["/bin/sh", "-c", LIMITED, "sh", sys.executable, "-c", RAISED]
    variables = {name: value for name, value in os.environ.items() if name != USERS}
    said = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    own, program, rollouts = map(int, said.stdout.split())
    assert (own, program) == (400, 200), said.stderr
    assert 0 < rollouts <= (400 - RESERVED) // PER_ROLLOUT


def test_an_endless_limit_that_the_system_refuses_is_raised_to_what_it_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []

    def grant(_: int, limits: tuple[int, int]) -> None:
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        given.append(limits[0])

    monkeypatch.setenv(USERS, "")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", grant)
    raise_limit()
    assert given == [HIGHEST_OF_MACOS]


def test_too_few_files_for_any_rollout_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (RESERVED, RESERVED))
    with pytest.raises(OutOfFiles, match=r"no rollout can be played: .* raise the limit .*ulimit"):
        most_rollouts()


def chained(error: OSError, how: str) -> BaseException:
    """Return another error that comes from `error`."""
    try:
        try:
            raise error
        except OSError as caught:
            if how == "group":
                raise ConnectionError("all failed") from ExceptionGroup("all", [caught])
            raise RuntimeError("Connection error.") from (caught if how == "cause" else None)
    except (RuntimeError, ConnectionError) as raised:
        return raised


@pytest.mark.parametrize("how", ["cause", "context", "group"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_an_error_that_comes_from_too_many_open_files_is_told(how: str, code: int) -> None:
    with pytest.raises(OutOfFiles, match=r"has all of its \d+ files .* smaller rollouts.concurr"):
        check_files(chained(OSError(code, "Too many open files"), how))
    check_files(chained(OSError(errno.ECONNREFUSED, "refused"), how))


def test_a_program_that_cannot_be_started_for_lack_of_files_is_told() -> None:
    async def start() -> Program:
        async with running_program(["true"], os.environ, "") as program:
            return program

    soft, hard = resource.getrlimit(LIMIT)
    with ExitStack() as opened:
        resource.setrlimit(LIMIT, (len(os.listdir("/dev/fd")) + 64, hard))  # noqa: PTH208
        opened.callback(resource.setrlimit, LIMIT, (soft, hard))
        files = [os.open(os.devnull, os.O_RDONLY)]
        with suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        for file in files[4:]:
            opened.callback(os.close, file)
        for file in files[:4]:  # for an event loop, and too few for a program's pipes
            os.close(file)
        with pytest.raises(OSError, match="Too many open files") as failed:
            asyncio.run(start())
    with pytest.raises(OutOfFiles):
        check_files(failed.value)
