"""The rollout that the current context plays, for programs that name a model and no address."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import httpx

from adapters.calls import Refused

MOST_AT_ONCE = 64

Roles = Mapping[str, Mapping[str, str]]
"""Role → its base_url, api_key and model."""

_roles: ContextVar[Roles] = ContextVar("roles")
_threads = ThreadPoolExecutor(MOST_AT_ONCE, "current rollout")


@contextmanager
def rollout_context(roles: Roles) -> Iterator[None]:
    """Make `roles` those of the rollout that the block plays, tasks and copied contexts included.

    A program in the block reaches each of its roles as LiteLLM's model `ratchet/<role>`.
    """
    token = _roles.set(roles)
    try:
        yield
    finally:
        _roles.reset(token)


def ask_role(role: str, body: Mapping[str, object]) -> "Future[dict[str, object]]":
    """Ask a role of the current rollout for a chat completion; the future raises Refused.

    A thread knows its rollout if it was started with a copy of the context, as by
    `asyncio.to_thread`. Raises Refused where no rollout is played.
    """
    roles = _roles.get(None)
    if roles is None:
        text = "No rollout is being played here, so there is nobody who answers; "
        remedy = "start the thread in contextvars.copy_context(), or ask the rollout's base URL."
        raise Refused(404, text + remedy, code="no_rollout")
    if role not in roles:
        text = f"Nobody answers the role {role!r}; there is: {', '.join(roles)}."
        raise Refused(404, text, code="no_role")
    whole = {name: value for name, value in body.items() if name != "stream"}
    return _threads.submit(_ask, roles[role], whole)


def _ask(endpoint: Mapping[str, str], body: Mapping[str, object]) -> dict[str, object]:
    headers = {
        "authorization": f"Bearer {endpoint['api_key']}",
        "x-stainless-retry-count": "0",  # an equal request that is being answered is no retry
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
    """Create the client once, which takes 50 ms. The door bounds the time of a request."""
    return httpx.Client(timeout=None)
