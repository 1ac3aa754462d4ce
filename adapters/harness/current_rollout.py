"""Whose call it is where a program names its model and no address."""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from adapters.calls import Refused
from adapters.harness.door_client import Roles, ask_over_http
from adapters.harness.imports import when_imported

Ask = Callable[[str, Mapping[str, Any]], Future[dict[str, Any]]]
"""From a role and the body of a chat completion to the body of its answer, or Refused."""

_ask: ContextVar[Ask] = ContextVar("ask")


@contextmanager
def asking(ask: Ask, roles: Collection[str]) -> Iterator[None]:
    """What is called in here, tasks and copied contexts included, is a rollout that asks by `ask`.

    A program in it reaches each of its roles as LiteLLM's model `ratchet/<role>`.
    """
    _provide(frozenset(roles))
    token = _ask.set(ask)
    try:
        yield
    finally:
        _ask.reset(token)


def asking_at(roles: Roles) -> AbstractContextManager[None]:
    """As `asking`, over HTTP: where the door is in another process, so nothing asks already."""
    if _ask.get(None) is not None:
        return nullcontext()
    return asking(partial(ask_over_http, roles), roles)


def asked(role: str, body: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """The answer to a call of the rollout that is being played here; Refused where there is none.

    A thread knows its rollout if it was started with a copy of the context, as by
    `asyncio.to_thread`.
    """
    ask = _ask.get(None)
    if ask is None:
        text = "No rollout is being played here, so there is nobody who answers; "
        remedy = "start the thread in contextvars.copy_context(), or ask the rollout's base URL."
        raise Refused(404, text + remedy, code="no_rollout")
    return ask(role, body)


@cache
def _provide(roles: frozenset[str]) -> None:
    """Have LiteLLM know the roles, whenever it is imported.

    An agent may import it as late as at its first call, and most never do: it takes seconds.
    """
    when_imported(
        "litellm", lambda: importlib.import_module("adapters.harness.litellm_provider").provide(roles)
    )
