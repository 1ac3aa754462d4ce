"""A role that a function of the user's answers, given the messages and the rollout's example."""

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy
from functools import partial

from adapters.calls import Example, Message, Refused, Request, Usage
from adapters.clients.litellm import LONGEST_SECONDS, Reply
from adapters.errors import UserError
from adapters.harness.agents import contained
from adapters.project.modules import load_module

Respond = Callable[[Request, Example], Awaitable[Reply]]
"""Answers a call without a policy, in a rollout of this example."""


class ScriptError(UserError):
    """An error for a function that a recipe names for a role and that does not exist."""


def load_function(role: str, name: str) -> Respond:
    """Load the function that answers `role`: `package.module:name`, or `file:name` of `agents/`.

    The function gets the messages and the example as plain values, and returns a text or a whole
    message with its tool calls. One that is not async runs in a thread of its own.
    """
    return partial(_respond, _find_function(role, name), name)


async def _respond(
    function: Callable[..., object], name: str, request: Request, example: Example
) -> Reply:
    """Call a function of the user's. Its failure is final, since it would fail again."""
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            said = await contained(function, *deepcopy(([*request.messages], example)))
    except Exception as error:  # it may raise anything, and the client is told
        text = f"The function {name} raised {type(error).__name__}: {error}"
        raise Refused(500, text, code="function_failed") from error
    message = _read_message(said, name)
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return Reply(message, reason, Usage(prompt_tokens=0, completion_tokens=0, cost=None))


def _read_message(said: object, name: str) -> Message:
    """Read what a function returned: the assistant's message or its text."""
    message = {"content": said} if isinstance(said, str) else said
    if isinstance(message, dict):
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        if isinstance(content, str) and isinstance(calls, list) and all(map(_is_call, calls)):
            if calls:
                return {"role": "assistant", "content": content, "tool_calls": calls}
            return {"role": "assistant", "content": content}
    text = f"The function {name} returned {said!r}; a text or an assistant's message is needed."
    raise Refused(500, text, code="function_failed")


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    named = function if isinstance(function, dict) else {}
    return all(isinstance(named.get(part), str) for part in ("name", "arguments"))


def _find_function(role: str, name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    module = load_module(module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        lacks = f"has no function {attribute!r}" if module else "cannot be imported"
        raise ScriptError(
            f"the role {role} is answered by {name}, and {module_name} {lacks}; "
            "name a function of a file of agents/, or of a module that can be imported"
        )
    return function
