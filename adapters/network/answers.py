"""Answers of strangers' servers: they end in time, are not large, and lead no key elsewhere.

Any other becomes a refusal of the status BROKEN, which no client asks for again."""

import asyncio
from functools import partial
from typing import Any, cast

import httpx

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.event_loop import call_in_thread, run_event_loop

LARGEST_ANSWER, LARGEST_ERROR = 3 * 2**24, 2**14
"""Bytes of an answer, and of a refusal, whose rest is left out."""
MOST_VALUES, MOST_REDIRECTS = 2**21, 3
WRITTEN_AT_ONCE = 2**16  # bytes of a request that a socket takes without waiting
ANSWERING_SECONDS, REFUSING_SECONDS = 60.0, 10.0
"""Time in which an answer that has begun must be whole, and in which a refusal is read."""
BROKEN, INSTEAD = 422, "x-ratchet-broken"
"""Status of a refusal that stands for an answer, and its header."""
OWN = {"content-encoding", "content-length", "transfer-encoding"}
"""Headers of what was sent, which is no more what is read."""


async def send_bounded(
    client: httpx.AsyncClient, request: httpx.Request, **how: Any
) -> httpx.Response:
    """Send a request, follow redirects to the same origin alone, and read the answer whole."""
    how |= {"stream": True, "follow_redirects": False}
    limits = request.extensions.get("timeout", {})
    writing, reading = (limits.get(one) or ANSWERING_SECONDS for one in ("write", "read"))
    writing *= int(request.headers.get("content-length", 0)) > WRITTEN_AT_ONCE
    try:
        for _ in range(MOST_REDIRECTS):
            request.headers["accept-encoding"] = "identity"
            async with asyncio.timeout(writing + reading) as limit:
                request.extensions["trace"] = partial(_bound_head, limit, reading)
                answer = await httpx.AsyncClient.send(client, request, **how)
            try:
                if answer.next_request is None:
                    return await _whole(answer, reading)
                request = _redirected(request, answer.next_request)
            finally:
                await answer.aclose()
        raise UserError(f"more than {MOST_REDIRECTS} redirects")
    except TimeoutError as error:
        raise httpx.ReadTimeout("no whole answer came in time", request=request) from error
    except UserError as error:
        said = f"the server gives {error}"
        told = {"detail": said, "error": {"message": said}}
        return httpx.Response(BROKEN, headers={INSTEAD: "1"}, json=told, request=request)


async def _bound_head(limit: asyncio.Timeout, seconds: float, event: str, _: object) -> None:
    if event.endswith("receive_response_headers.started"):  # the request is written
        limit.reschedule(asyncio.get_running_loop().time() + seconds)


def _redirected(asked: httpx.Request, following: httpx.Request) -> httpx.Request:
    before, after = asked.url, following.url
    if (before.scheme, before.netloc) != (after.scheme, after.netloc):
        there = f"{after.scheme}://{after.netloc.decode()}"[:100]
        raise UserError(
            f"a redirect to {there}, which gets no key; give that server's own URL if you trust it"
        )
    return following


async def _whole(answer: httpx.Response, seconds: float) -> httpx.Response:
    """Read an answer whole, a refusal as far as it goes; TimeoutError if no more of it comes."""
    clock, is_error = asyncio.get_running_loop(), answer.is_error
    most = LARGEST_ERROR if is_error else LARGEST_ANSWER
    seconds = min(seconds, REFUSING_SECONDS if is_error else ANSWERING_SECONDS)
    read, last = bytearray(), clock.time()
    try:
        async with asyncio.timeout(seconds):
            async for part in answer.aiter_raw():
                read += part
                last = clock.time()
                if len(read) > most:
                    break
    except TimeoutError:
        if clock.time() - last > seconds / 2:
            raise
        if not is_error:
            raise UserError(f"an answer that has no end after {seconds:g} s") from None
    body = bytes(read)
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise UserError("an answer in an encoding that it was not asked for")
    if len(body) > most and not is_error:
        raise UserError(f"an answer of more than {most >> 20} MiB")
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES and body[:1] in b"[{":
        raise UserError(f"an answer of more than {MOST_VALUES:,} values")
    kept = [(name, value) for name, value in answer.headers.multi_items() if name not in OWN]
    whole = b"{}" if body == b"null" else body[:most]  # null is no answer yet, to the SDK
    return httpx.Response(answer.status_code, headers=kept, content=whole, request=answer.request)


def bounded_client(url: str, seconds: httpx.Timeout | float) -> httpx.AsyncClient:
    client = httpx.AsyncClient(timeout=seconds, verify=url.startswith("https:"))  # reads files
    cast(Any, client).send = partial(send_bounded, client)
    return client


def ask(method: str, url: str, seconds: httpx.Timeout | float, **what: Any) -> httpx.Response:
    async def asking() -> httpx.Response:
        async with bounded_client(url, seconds) as client:
            return await client.request(method, url, **what)

    return call_in_thread("answer", run_event_loop, asking()).result()  # a notebook has a loop


def said_instead(answer: httpx.Response) -> str:
    return str(answer.json()["detail"]) if INSTEAD in answer.headers else ""
