"""A request's body, read to its end and parsed as strict JSON."""

import json

from fastapi import Request
from starlette.requests import ClientDisconnect

from adapters.calls import Refused
from adapters.dialects.fields import bad_request, refuse_constant

LARGEST_BODY = 16 * 1024 * 1024
MOST_BRACKETS = 500_000
"""Bound on the arrays and objects, since their parser lets nothing else run meanwhile."""
DEEPEST = 200
"""The most levels of nesting; readers of a body are recursive."""


async def read_body(request: Request) -> bytes:
    """Read all of the body even if it is refused: a client that still writes reads no answer."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= LARGEST_BODY:
                parts.append(part)
    except ClientDisconnect as error:
        raise bad_request("The client disconnected before its request was complete.") from error
    if size > LARGEST_BODY:
        text = f"The body has {size} bytes; the most that is read is {LARGEST_BODY}."
        raise Refused(413, text, code="body_too_large")
    return b"".join(parts)


def parse_json(body: bytes) -> object:
    """Parse strict JSON: no NaN, 1e999 or half a surrogate pair, all of which Python accepts."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MOST_BRACKETS:
        text = (
            f"The body has {brackets} opening brackets; the most that is read is {MOST_BRACKETS}."
        )
        raise Refused(413, text, code="body_too_large")
    try:
        value = json.loads(body, parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON ({error}).", code="invalid_json") from error
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _inside(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in inner if isinstance(item, dict | list)]
