"""Event loops of the running clock, which no standstill of the process hurts, and a watchdog."""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratchet.adapters.process.clock import LONGEST_TICK
from ratchet.adapters.process.event_loop import watch_event_loop

WAIT_SECONDS, STILL_SECONDS = LONGEST_TICK + 2, LONGEST_TICK + 3

PROGRAM = """
import asyncio, sys
import httpx
from ratchet.adapters.process.event_loop import run_event_loop

async def ask(http, path):
    answer = await http.get(path)
    return answer.text

async def main():
    url, seconds = sys.argv[1], float(sys.argv[2])
    async with httpx.AsyncClient(base_url=url, timeout=seconds, trust_env=False) as http:
        asking = asyncio.create_task(ask(http, "/"))
        await asyncio.sleep(0.5)
        print("asked", flush=True)
        print(await asking)

run_event_loop(main())
"""
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nplayed"


def ask_and_stand_still(answer: bytes, seconds: float) -> str:
    """Return what a client says that is answered while it stands still."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                f"http://127.0.0.1:{server.getsockname()[1]}",
                str(WAIT_SECONDS),
            ],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as client,
    ):
        connection, _ = server.accept()
        with connection:
            assert client.stdout is not None
            assert client.stdout.readline() == "asked\n"
            client.send_signal(signal.SIGSTOP)
            connection.sendall(answer)
            time.sleep(seconds)
            client.send_signal(signal.SIGCONT)
            return client.communicate(timeout=60)[0]


def test_a_client_that_stood_still_reads_the_answer_that_came_meanwhile() -> None:
    assert ask_and_stand_still(ANSWER, STILL_SECONDS) == "played\n"


def test_a_client_that_is_not_answered_still_gives_up_by_its_own_timeout() -> None:
    assert "httpx.ReadTimeout" in ask_and_stand_still(b"", 1)


async def blocking(records: list[logging.LogRecord]) -> None:
    while not records:
        time.sleep(0.05)


def test_a_blocking_coroutine_is_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with watch_event_loop(first_word=0.2):
            await blocking(caplog.records)

    asyncio.run(work())
    assert "have stood still for" in caplog.text
    lines = [blocking.__code__.co_firstlineno + 1, blocking.__code__.co_firstlineno + 2]
    assert any(f"{__file__}, line {line}, in blocking" in caplog.text for line in lines)


def test_a_running_loop_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with watch_event_loop(first_word=20.0):
            await asyncio.sleep(0.3)

    asyncio.run(work())
    assert not [record for record in caplog.records if record.name.endswith("event_loop")]
