"""A role that a function of the user's answers: messages and the rollout's example → a message."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from copy import deepcopy
from functools import partial
from typing import Any

from adapters.calls import Example, Message, Refused, Request
from adapters.errors import UserError
from adapters.harness.agents import contained, imported, in_thread
from adapters.litellm import LONGEST_SECONDS, Helped

Reply = Callable[[Request, Example], Awaitable[Helped]]
"""What somebody who is not a policy says to a call, in a rollout of this example."""


class ScriptError(UserError):
    """No function answers to the name that a recipe gives for a role."""


def scripted(role: str, name: str) -> Reply:
    """The function `package.module:name`, plain or async, as who answers `role`.

    It gets the messages and the example as plain values, and returns a text, or a whole message
    with its tool calls. A plain one runs in a thread of its own.
    """
    return partial(_said, _function(role, name), name)


async def _said(
    function: Callable[..., Any], name: str, request: Request, example: Example
) -> Helped:
    """What a function of the user's says. Its failure is final: it would fail again."""
    call = function if inspect.iscoroutinefunction(function) else partial(in_thread, function)
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            said = await contained(call, *deepcopy(([*request.messages], example)))
    except Exception as error:  # it may raise anything, and its caller is told
        text = f"The function {name} raised {type(error).__name__}: {error}"
        raise Refused(500, text, code="function_failed") from error
    message = _message(said, name)
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return Helped(message, reason, prompt_tokens=0, completion_tokens=0, cost=None)


def _message(said: Any, name: str) -> Message:
    """The assistant's message that a function returned, or the text of one."""
    message = {"content": said} if isinstance(said, str) else said
    if isinstance(message, dict):
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        if isinstance(content, str) and isinstance(calls, list) and all(map(_is_call, calls)):
            calling = {"tool_calls": calls} if calls else {}
            return {"role": "assistant", "content": content, **calling}
    text = f"The function {name} returned {said!r}; a text or an assistant's message is needed."
    raise Refused(500, text, code="function_failed")


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    named = function if isinstance(function, dict) else {}
    return all(isinstance(named.get(part), str) for part in ("name", "arguments"))


def _function(role: str, name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    module = imported(module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        lacks = f"has no function {attribute!r}" if module else "cannot be imported"
        raise ScriptError(
            f"the role {role} is answered by {name}, and {module_name} {lacks}; "
            "name a function that is there, in a module on the path"
        )
    return function
