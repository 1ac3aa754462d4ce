"""A proxy in front of an engine that does to chosen requests what networks and services do."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from starlette.types import Receive, Scope, Send

from ratchet.adapters.network.app_server import AppServer

Kind = Literal[
    "limited",  # 429, with a retry-after
    "broken",  # 500
    "unavailable",  # 503
    "refused",  # 401
    "dropped before",  # the connection ends; the engine has not seen the request
    "dropped after",  # the connection ends; the engine has, and acts on it
    "silent",  # the engine acts on it, and no answer ever comes
    "slow",  # an answer that takes its time
    "try_again",  # a poll answered by 408: not yet
    "user",  # the engine acts on it, yet its future says that it failed, and blames the request
    "server",  # … and blames the service
    "unknown",  # … and blames nobody
]
STATUS = {"limited": 429, "broken": 500, "unavailable": 503, "refused": 401}
FAILURES = ("user", "server", "unknown")
SLOW_SECONDS = 1.0
TRAINING = ("/forward", "/forward_backward", "/optim_step", "/save_weights", "_for_sampler")
HOP = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding", "date"}


@dataclass
class Fault:
    """What befalls `times` requests to an endpoint, after `skip` of them went well."""

    endpoint: str
    kind: Kind
    skip: int = 0
    times: int = 1

    def strikes(self, endpoint: str) -> bool:
        """Whether it befalls this request; counts it."""
        if endpoint != self.endpoint:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return self.times >= 0


@dataclass
class FaultProxy:
    """An ASGI application. `seen` counts the requests of each endpoint, `struck` the faults."""

    upstream: str
    tick: float = 0
    """Seconds between the moments at which training requests are answered; 0 answers at once."""
    faults: list[Fault] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    url: str = ""
    _due: dict[str, float] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    def script(self, *faults: Fault) -> None:
        """From now on these befall, and nothing else; counting begins anew."""
        self.faults = list(faults)
        self.seen.clear()
        self.struck.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, body = scope["path"].rpartition("/")[2], await read_body(receive)
        self.seen[endpoint] += 1
        fault = next((fault for fault in self.faults if fault.strikes(endpoint)), None)
        kind = fault.kind if fault else None
        if kind:
            self.struck[kind] += 1
        if endpoint == "retrieve_future" and self.tick:
            await asyncio.sleep(self._due.get(_request_id(body), 0) - time.monotonic())
        failed = self._failed.get(_request_id(body)) if endpoint == "retrieve_future" else None
        if failed:
            await answer_json(send, 200, {"error": "the proxy says so", "category": failed})
        elif kind in STATUS:
            await answer_json(send, STATUS[kind], {"detail": "the proxy says so"})
        elif kind == "try_again":
            pending = {"type": "try_again", "queue_state": "paused_capacity"}
            await answer_json(send, 408, {**pending, "request_id": _request_id(body)})
        elif kind == "dropped before":
            _drop(receive)
        else:
            await self._pass_on(scope, body, receive, send, kind)

    async def _pass_on(
        self, scope: Scope, body: bytes, receive: Receive, send: Send, kind: str | None
    ) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.request(
                scope["method"],
                f"{self.upstream}{scope['path']}?{scope['query_string'].decode()}",
                content=body,
                headers=[(k, v) for k, v in scope["headers"] if k.decode().lower() not in HOP],
            )
        if self.tick and scope["path"].endswith(TRAINING):
            due = (time.monotonic() // self.tick + 1) * self.tick
            self._due[response.json()["request_id"]] = due
        if kind in FAILURES:
            self._failed[response.json()["request_id"]] = kind
        elif kind == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        elif kind == "silent":
            await self._closing.wait()
        if kind in ("silent", "dropped after"):
            _drop(receive)
            return
        headers = [(k, v) for k, v in response.headers.raw if k.decode().lower() not in HOP]
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        await send({"type": "http.response.body", "body": response.content})

    def close(self) -> None:
        """End the silences."""
        self._closing.set()


@contextmanager
def proxied(upstream: str, tick: float = 0) -> Iterator[FaultProxy]:
    """A proxy in front of the engine at `upstream`, in a thread."""
    proxy = FaultProxy(upstream, tick)
    server = AppServer(proxy)
    proxy.url = f"http://127.0.0.1:{server.port}"
    server.start()
    try:
        yield proxy
    finally:
        server.loop.call_soon_threadsafe(proxy.close)
        server.stop()


async def read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def answer_json(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"0.2")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def _drop(receive: Any) -> None:
    """End the connection without an answer: uvicorn's request cycle owns its transport."""
    receive.__self__.transport.abort()


def _request_id(body: bytes) -> str:
    return json.loads(body)["request_id"]
