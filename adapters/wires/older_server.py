"""Calls to a server of an older wire; what it refuses is brought into the SDK's categories."""

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from starlette.responses import JSONResponse, Response
from yarl import URL

from ratchet.adapters.wires.asking import API, KEY_REFUSED, PROTOBUF, UNKNOWN_ROUTE
from ratchet.adapters.wires.fields import CallRefused
from ratchet.durable.wire.results import (
    add_loss,
    complete_prompt,
    losses_from_json,
    parse_losses,
    parse_sample,
    sample_from_json,
)

CALL_SECONDS = 120.0
POLL_SECONDS = 40.0
"""Below the 45 s after which the SDK gives up a poll."""
CONNECTING_SECONDS = 10.0
FAILED = 500
"""Status of a server whose own program failed, as it will again: one of a proxy is 502 to 504."""
TRIES, PAUSE_SECONDS = 3, 0.5
TRIED_AGAIN = (408, 409, 425, 429)
MOST_PROMISES = 2**14
CATEGORIES = ("user", "server", "unknown")
UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)
"""What reading an answer raises that is not what it should be."""


@dataclass(frozen=True)
class Promise:
    """A result that the server has promised: of datums, or of a prompt of so many tokens."""

    prompt: int | None = None
    """Tokens of a prompt whose log-probabilities were asked for."""


@dataclass(frozen=True)
class Answer:
    """An answer of the server, read whole."""

    path: str
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def media(self) -> str:
        return self.headers.get("Content-Type", "")

    def json(self) -> Any:
        """Return the parsed body; ValueError if it is no JSON."""
        return json.loads(self.body)


class OlderServer:
    """The client of a server, and what it has promised."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._client: aiohttp.ClientSession | None = None
        self._promises: OrderedDict[str, Promise] = OrderedDict()
        self._failures: Counter[str] = Counter()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        seconds: float = CALL_SECONDS,
    ) -> Answer:
        """Send a request, and read its answer; aiohttp.ClientError if none comes."""
        if self._client is None:  # it belongs to the event loop of the first request
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=httpx.create_ssl_context()),
                headers={"X-API-Key": self._key},
                skip_auto_headers=("Content-Type",),
                proxy=_proxy_of(self._url),
            )
        waiting = aiohttp.ClientTimeout(sock_connect=CONNECTING_SECONDS, sock_read=seconds)
        url = URL(f"{self._url}{path}", encoded=True)
        sent = self._client.request(
            method, url, data=body, headers=headers, timeout=waiting, allow_redirects=False
        )
        async with sent as answer:
            read = await answer.read()
            return Answer(url.path, answer.status, answer.reason or "", answer.headers, read)

    async def pass_on(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        """Send a call as it is; one at which the server fails each time is refused (CallRefused).

        The SDK would repeat it for minutes.
        """
        for _ in range(TRIES - 1):
            answer = await self._ask(method, path, body, headers)
            if answer.status != FAILED:
                return answer
            await asyncio.sleep(PAUSE_SECONDS)
        answer = await self._ask(method, path, body, headers)
        if answer.status == FAILED:
            raise CallRefused(f"the server failed {TRIES} times at {path}: {said(answer)}")
        return answer

    async def ask(self, call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the server answers to a call at once; CallRefused if it refuses."""
        content = json.dumps(body).encode()
        answer = await self.pass_on("POST", f"{API}{call}", content, JSON_HEADERS)
        if not answer.is_success:
            passing = answer.status in TRIED_AGAIN or answer.status >= FAILED
            category = "server" if passing else "user"
            raise CallRefused(f"{call} ({answer.status}): {said(answer)}", category)
        found = answer.json()
        return found if isinstance(found, dict) else {}

    async def result(self, request_id: str) -> dict[str, Any]:
        """Wait for a promised result in JSON; CallRefused if the server says that it failed."""
        while True:
            answer = await self.poll({"request_id": request_id}, {})
            found = json.loads(bytes(answer.body))
            if answer.status_code == 200 and "error" in found:
                raise CallRefused(found["error"], found["category"])
            if answer.status_code == 200 and found.get("type") != "try_again":
                return found
            if answer.status_code not in (200, 408):
                raise CallRefused(f"{found.get('detail', found)}", "server")

    def promise(self, request_id: str, promised: Promise) -> None:
        self._promises[request_id] = promised
        while len(self._promises) > MOST_PROMISES:
            self._promises.popitem(last=False)

    async def poll(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        """Return a promised result, or that it is not yet there, as the SDK reads it."""
        request_id = str(asked["request_id"])
        content = json.dumps({**asked, "request_id": request_id}).encode()
        sent = {**headers, **JSON_HEADERS}
        try:
            answer = await self._ask("POST", f"{API}retrieve_future", content, sent, POLL_SECONDS)
        except aiohttp.SocketTimeoutError:
            return not_yet(request_id)
        if answer.status == 200:
            self._failures.pop(request_id, None)
            return self._read(request_id, answer)
        return self._read_refusal(request_id, answer)

    def _read(self, request_id: str, answer: Answer) -> Response:
        promised, body = self._promises.get(request_id), answer.body
        try:
            if PROTOBUF in answer.media:
                return Response(_mended(body, promised), media_type=PROTOBUF)
            found = json.loads(body)
            if "sequences" in found:
                message = sample_from_json(found)
                return Response(_completed(message, promised), media_type=PROTOBUF)
            if "loss_fn_outputs" in found:
                losses = losses_from_json(found)
                add_loss(losses)
                return Response(losses.SerializeToString(), media_type=PROTOBUF)
            if "error" in found:
                category = found.get("category")
                known = category if category in CATEGORIES else "unknown"
                return JSONResponse({**found, "category": known})
            return JSONResponse(_of_three_segments(found))
        except UNREADABLE as error:
            return failed(f"the server's answer cannot be read: {error}", "server")

    def _read_refusal(self, request_id: str, answer: Answer) -> Response:
        """Bring a status into what the SDK takes for final, or for passing, as it is one of them.

        An older server says by a 400 that a request failed, which the SDK takes for a proxy's.
        """
        status = answer.status
        if status == 408:
            return not_yet(request_id)
        if status == 404:
            return JSONResponse({"detail": said(answer)}, 410)
        if status == FAILED:
            self._failures[request_id] += 1
            if self._failures[request_id] >= TRIES:
                del self._failures[request_id]
                return failed(said(answer), "server")
        if 400 <= status < FAILED and status not in (*KEY_REFUSED, *TRIED_AGAIN, 402, 410):
            return failed(said(answer), "user")
        return passed(answer)


JSON_HEADERS = {"Content-Type": "application/json"}


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL; aiohttp would ask at each request."""
    place = urlsplit(url)
    return None if proxy_bypass(place.netloc) else getproxies().get(place.scheme)


def _mended(body: bytes, promised: Promise | None) -> bytes:
    """Complete an answer in protobuf, which lacks a metric or a place."""
    if promised is None:
        return body
    if promised.prompt is not None:
        return _completed(parse_sample(body), promised)
    losses = parse_losses(body)
    add_loss(losses)
    return losses.SerializeToString()


def _completed(message: Any, promised: Promise | None) -> bytes:
    if promised is not None and promised.prompt is not None:
        complete_prompt(message, promised.prompt)
    return message.SerializeToString()


def _of_three_segments(found: dict[str, Any]) -> dict[str, Any]:
    """Write a sampler's path, which some servers write as tinker://MODEL/NAME, as the SDK reads it.

    Those servers read it with three segments too.
    """
    path = found.get("path")
    if isinstance(path, str) and path.startswith("tinker://") and path.count("/") == 3:
        model, _, name = path.removeprefix("tinker://").partition("/")
        return {**found, "path": f"tinker://{model}/sampler_weights/{name}"}
    return found


def said(answer: Answer) -> str:
    """Return what a server says of a refusal, in a line."""
    text = answer.body.decode(errors="replace")
    try:
        detail = answer.json().get("detail")
    except (AttributeError, ValueError):
        detail = text
    if text == UNKNOWN_ROUTE:
        return f"this server has no call {answer.path}"
    if isinstance(detail, list):  # of FastAPI, a problem each
        places = [".".join(str(part) for part in one.get("loc", ())) for one in detail]
        problems = zip(places, (one.get("msg", "") for one in detail), strict=True)
        detail = "; ".join(f"{place}: {text}" for place, text in problems)
    return str(detail or answer.reason)[:2000]


def passed(answer: Answer) -> Response:
    """Return a server's answer as it is, with its refusal in a line."""
    if answer.status < 400:
        body = b"" if answer.status == 204 else answer.body
        return Response(body, answer.status, media_type=answer.media or None)
    after = answer.headers.get("Retry-After")
    headers = {"retry-after": after} if after else None
    return JSONResponse({"detail": said(answer)}, answer.status, headers)


def not_yet(request_id: str) -> Response:
    pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return JSONResponse(pending, 408)


def failed(text: str, category: str) -> Response:
    return JSONResponse({"error": text, "category": category})
