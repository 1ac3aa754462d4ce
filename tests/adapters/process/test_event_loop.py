"""An event loop of the running clock: a standstill of the process ends no wait, of nobody's."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from adapters.process.running_clock import LONGEST_TICK

WAIT_SECONDS, STILL_SECONDS = LONGEST_TICK + 2, LONGEST_TICK + 3

PROGRAM = """
import asyncio, sys
import httpx
from adapters.process.event_loop import run_event_loop

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
