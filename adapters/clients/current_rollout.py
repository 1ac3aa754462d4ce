"""The rollout that the current context plays, for programs that name a model and no address."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypedDict

import httpx

from ratchet.adapters.calls import Refused
from ratchet.adapters.clients.libraries import tls


class Endpoint(TypedDict):
    """The address, the key and the model's name with which an agent calls a role."""

    base_url: str
    api_key: str
    model: str


Roles = Mapping[str, Endpoint]

_roles: ContextVar[Roles] = ContextVar("roles")


def role_variables(roles: Roles) -> dict[str, str]:
    """Return the environment variables by which a program finds its roles.

    The first role, its own, has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL; every other has
    <ROLE>_BASE_URL and so on.
    """
    variables = dict[str, str]()
    for number, (role, of_role) in enumerate(roles.items()):
        prefix = "OPENAI" if number == 0 else re.sub(r"\W", "_", role).upper()
        variables |= {f"{prefix}_{name.upper()}": str(value) for name, value in of_role.items()}
    return variables


@contextmanager
def rollout_context(roles: Roles) -> Iterator[None]:
    """Have the block, its tasks and its copied contexts play a rollout with these `roles`.

    A program in the block reaches each of its roles as LiteLLM's model `ratchet/<role>`.
    """
    token = _roles.set(roles)
    try:
        yield
    finally:
        _roles.reset(token)


def ask_role(role: str, body: Mapping[str, object]) -> dict[str, object]:
    """Ask a role of the current rollout for a chat completion, and block; Refused if it has none.

    A thread knows its rollout by a copy of the context, as `asyncio.to_thread` makes one.
    """
    with _reaching_the_door(), httpx.Client(timeout=None, verify=tls()) as http:
        return _read(http.send(_request(role, body)))


async def await_role(role: str, body: Mapping[str, object]) -> dict[str, object]:
    """Ask as `ask_role` does; the door notices if the task is cancelled."""
    with _reaching_the_door():
        async with httpx.AsyncClient(timeout=None, verify=tls()) as http:
            return _read(await http.send(_request(role, body)))


def _request(role: str, body: Mapping[str, object]) -> httpx.Request:
    """Return the request to the door; Refused where no rollout is played."""
    roles = _roles.get(None)
    if roles is None:
        text = "No rollout is being played here, so there is nobody who answers; "
        remedy = "start the thread in contextvars.copy_context(), or ask the rollout's base URL."
        raise Refused(404, text + remedy, code="no_rollout")
    if role not in roles:
        text = f"Nobody answers the role {role!r}; there is: {', '.join(roles)}."
        raise Refused(404, text, code="no_role")
    endpoint = roles[role]
    headers = {
        "authorization": f"Bearer {endpoint['api_key']}",
        "x-stainless-retry-count": "0",  # an equal request that is being answered is no retry
    }
    whole = {name: value for name, value in body.items() if name != "stream"}
    url = f"{endpoint['base_url']}/chat/completions"
    return httpx.Request("POST", url, json=whole, headers=headers)


def _read(response: httpx.Response) -> dict[str, object]:
    answered = response.json()
    if response.is_error:
        refused = answered["error"]
        raise Refused(response.status_code, refused["message"], code=refused["code"])
    return answered


@contextmanager
def _reaching_the_door() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        text = f"The door could not be reached ({type(error).__name__}: {error}); try again."
        raise Refused(503, text, code="no_door") from error
