"""Connections whose clients show no key: closed in time, and bounded in number."""

import asyncio
import resource
import socket
import time
import weakref
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ratchet.adapters.network.app_server import AppServer
from ratchet.durable import connections
from tests.support.door.garbage import no_collector

HEAD = "POST /asked HTTP/1.1\r\nhost: x\r\nkey: {}\r\ncontent-length: 4\r\n\r\n"
KNOWN, STRANGE = (HEAD.format(key).encode() for key in ("right", "wrong"))

pytestmark = pytest.mark.timeout(30)


async def answer(request: Request) -> Response:
    if request.headers["key"] != "right":
        return Response("no", 401)
    return Response(await request.body())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AppServer]:
    monkeypatch.setattr(connections, "LONGEST_SILENCE", 0.5)
    monkeypatch.setattr(connections, "LAST_LOOK", 0.1)
    app = FastAPI()
    app.add_api_route("/asked", answer, methods=["POST"])
    server = AppServer(app)
    server.start()
    yield server
    server.stop()


def connect(server: AppServer, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(sent)
    return connection


def read(connection: socket.socket) -> bytes:
    """Read all that comes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answered(connection: socket.socket) -> bytes:
    """Read up to the end of an answer that repeats `abcd`."""
    said = b""
    while not said.endswith(b"abcd"):
        said += connection.recv(65536)
    return said


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", b"POST /ask", KNOWN, KNOWN + b"ab", STRANGE, STRANGE + b"ab"],
    ids=["nothing", "a line", "half a head", "a head", "half a body", "refused", "refused, half"],
)
def test_a_connection_that_sends_no_whole_request_is_closed(server: AppServer, sent: bytes) -> None:
    with connect(server, sent) as connection:
        assert b" 200 " not in read(connection)


def test_a_connection_that_showed_no_key_is_closed_after_its_answer(server: AppServer) -> None:
    with connect(server, STRANGE + b"abcd") as connection:
        assert read(connection).startswith(b"HTTP/1.1 401 ")


def test_a_connection_that_showed_a_key_stays_while_nothing_is_asked(server: AppServer) -> None:
    with connect(server) as connection, connect(server) as silent:
        for _ in range(2):
            connection.sendall(KNOWN + b"abcd")
            assert answered(connection).startswith(b"HTTP/1.1 200 ")
            read(silent)  # longer than a silent connection is kept
        connection.sendall(b"POST /ask")
        assert read(connection) == b""


def test_a_closed_connection_leaves_memory_without_the_garbage_collector(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[object] = []
    ending = connections.PROTOCOL.connection_lost

    def lose(connection: asyncio.Protocol, error: Exception | None) -> None:
        weakref.finalize(connection, left.append, connection.__class__)
        ending(connection, error)

    monkeypatch.setattr(connections.PROTOCOL, "connection_lost", lose)
    with no_collector():
        with connect(server, KNOWN + b"abcd") as connection:
            answered(connection)
        until = time.monotonic() + 10
        while not left and time.monotonic() < until:
            time.sleep(0.01)
        assert len(left) == 1


def test_a_body_that_comes_in_parts_is_waited_for(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LONGEST_SILENCE", 2.0)
    with connect(server, KNOWN) as connection:
        for letter in (b"a", b"b", b"c", b"d"):
            with connect(server) as silent:
                silent.settimeout(0.6)
                with pytest.raises(TimeoutError):
                    read(silent)
            connection.sendall(letter)
        assert answered(connection).startswith(b"HTTP/1.1 200 ")


def test_many_silent_connections_keep_nobody_with_a_key_away(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LONGEST_SILENCE", 60.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert connections.most_strangers() == 32
    silent = [connect(server, b"" if number % 2 else b"POST /ask") for number in range(100)]
    answered = httpx.post(f"{server.url}/asked", content=b"abcd", headers={"key": "right"})
    assert answered.text == "abcd"
    assert [read(one) for one in silent[:60]] == [b""] * 60
    for one in silent:
        one.close()
