"""A server that gives one answer to whatever it is asked, as no server of an API would."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

Parts = AsyncIterator[bytes]
HEAD = "HTTP/1.1 {status}\r\ncontent-type: {media}\r\n{more}\r\n"
JSON = "application/json"
MANY = 2**20
TICK_SECONDS = 0.2


@dataclass
class HostileServer:
    """A server, and what it was asked: the headers of each request, by lower-case names."""

    answer: "Callable[[HostileServer], Parts]"
    url: str = ""
    elsewhere: str = ""
    """Where a redirect leads."""
    asked: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            lines = (line.partition(": ") for line in head.splitlines()[1:] if line)
            self.asked.append({name.lower(): value for name, _, value in lines})
            await reader.readexactly(int(self.asked[-1].get("content-length", 0)))
            async for part in self.answer(self):
                writer.write(part)
                self.sent += len(part)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def head(status: str = "200 OK", media: str = JSON, more: str = "") -> bytes:
    return HEAD.format(status=status, media=media, more=more).encode()


def saying(body: bytes, status: str = "200 OK", media: str = JSON, more: str = "") -> "Answer":
    """Return a whole answer of a body."""

    async def answer(_: HostileServer) -> Parts:
        yield head(status, media, f"content-length: {len(body)}\r\n{more}") + body

    return answer


def endless(part: bytes, status: str = "200 OK", pause: float = 0.0) -> "Answer":
    """Return an answer that goes on for as long as somebody reads it."""

    async def answer(_: HostileServer) -> Parts:
        yield head(status)
        while True:
            await asyncio.sleep(pause)
            yield part

    return answer


async def dripping(_: HostileServer) -> Parts:
    """Begin an answer whose head goes on for as long as somebody reads it."""
    yield b"HTTP/1.1 200 OK\r\nx-a: "
    while True:
        await asyncio.sleep(TICK_SECONDS)
        yield b"a"


async def _elsewhere(server: HostileServer) -> Parts:
    yield head(
        "307 Temporary Redirect", more=f"location: {server.elsewhere}\r\ncontent-length: 0\r\n"
    )


async def _in_a_circle(server: HostileServer) -> Parts:
    yield head("307 Temporary Redirect", more=f"location: {server.url}/a\r\ncontent-length: 0\r\n")


async def _echo(server: HostileServer) -> Parts:
    keys = [server.asked[-1].get(one, "") for one in ("x-api-key", "authorization")]
    body = json.dumps({"detail": f"no {keys}", "error": {"message": f"no {keys}"}}).encode()
    yield head("400 Bad Request", more=f"content-length: {len(body)}\r\n") + body


Answer = Callable[[HostileServer], Parts]
BOMB = gzip.compress(bytes(64 * MANY), compresslevel=1)
NO_END: Mapping[str, Answer] = {
    "a text without an end": endless(b"a" * 2**16),
    "a list without an end": endless(b'{"a":{},' * 2**13),
    "one byte now and then": endless(b"[", pause=TICK_SECONDS),
    "a refusal without an end": endless(b"a" * 2**16, "400 Bad Request"),
    "a slow refusal": endless(b"a", "400 Bad Request", TICK_SECONDS),
    "a redirect elsewhere": _elsewhere,
    "redirects in a circle": _in_a_circle,
    "a bomb": saying(BOMB, more="content-encoding: gzip\r\n"),
    "an unknown encoding": saying(b"abc", more="content-encoding: br\r\n"),
    "many values": saying(b"[" + b"{}," * MANY * 4 + b"0]"),
}
"""Answers out of bounds, by what they are."""
SHAPES: Mapping[str, Answer] = {
    **{
        text: saying(text.encode())
        for text in (
            *("", "{}", "[]", "null", "5", '"text"', "NaN", "{", "[[]]", '{"a": null}', "1e999"),
            *('{"session_id": 5}', '{"models": [null]}', '{"supported_models": {}}'),
        )
    },
    "deep": saying(b"[" * 10**5),
    "long": saying(b'"' + b"a" * 10**6 + b'"'),
    "long number": saying(b"1" * 10**5),
    "HTML": saying(b"<html>", media="text/html"),
    "protobuf": saying(b"\x0a\xff\xff\xff\xff", media="application/x-protobuf"),
    "no text": saying(b"\xff\xfe\xff"),
    "no content": saying(b"", "204 No Content"),
    "not modified": saying(b"", "304 Not Modified"),
    "a long refusal": saying(b"a" * 10 * MANY, "400 Bad Request"),
    "another refusal": saying(b'{"detail": {"detail": [1]}}', "418 No"),
    "its keys": _echo,
}


@contextmanager
def hostile(answer: Answer) -> Iterator[HostileServer]:
    """Serve an answer, in a thread."""
    server, loop = HostileServer(answer), asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.serve, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        listening.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
