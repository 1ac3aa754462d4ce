"""The door asked over HTTP, as `Door.ask` is where it is in the same process."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx

from adapters.calls import Refused

MOST_AT_ONCE = 64

Roles = Mapping[str, Mapping[str, str]]
"""Role → its base_url and api_key, as agents get them."""

_threads = ThreadPoolExecutor(MOST_AT_ONCE, "door client")


def ask_over_http(roles: Roles, role: str, body: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """The body of the answer to a chat completion; its exception is Refused."""
    if role not in roles:
        text = f"Nobody answers the role {role!r}; there is: {', '.join(roles)}."
        raise Refused(404, text, code="no_role")
    whole = {name: value for name, value in body.items() if name != "stream"}
    return _threads.submit(_answer, roles[role], whole)


def _answer(endpoint: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {
        "authorization": f"Bearer {endpoint['api_key']}",
        "x-stainless-retry-count": "0",  # an equal request under way is no retry of ours
    }
    try:
        url = f"{endpoint['base_url']}/chat/completions"
        response = _client().post(url, json=body, headers=headers)
    except httpx.TransportError as error:
        text = f"The door could not be reached ({type(error).__name__}: {error}); try again."
        raise Refused(503, text, code="no_door") from error
    answered = response.json()
    if response.is_error:
        refused = answered["error"]
        raise Refused(response.status_code, refused["message"], code=refused["code"])
    return answered


@cache
def _client() -> httpx.Client:
    """Of no timeout: the door holds requests while weights are swapped. Making one takes 50 ms."""
    return httpx.Client(timeout=None)
