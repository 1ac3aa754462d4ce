"""Backends of roles: a function of the user's, a model that LiteLLM reaches, or a record."""

import asyncio
import difflib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from ratchet.adapters.calls import (
    Begun,
    CallId,
    Completion,
    Example,
    Message,
    Refused,
    RefusedCall,
    Request,
    Usage,
)
from ratchet.adapters.clients import litellm
from ratchet.adapters.clients.litellm import LONGEST_SECONDS, Reply
from ratchet.adapters.dialects.fields import Fields
from ratchet.adapters.dialects.openai_chat import to_chat_fields
from ratchet.adapters.door.role_calls import Answer, Memory, request_sha
from ratchet.adapters.door.roles import FUNCTION, is_untrained, policy_of
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import contained
from ratchet.adapters.project.modules import load_module

Backend = Callable[[Example], Answer]
"""Creates what answers the calls of a role in a rollout of this example."""

Respond = Callable[[Request, Example], Awaitable[Reply]]
"""Answers a call without a policy, in a rollout of this example."""


def create_backends(roles: Mapping[str, str], run_seed: int) -> dict[str, Backend | str]:
    """Return each role's backend, by a recipe's `roles`; for a policy its name.

    A policy that is not trained has its whole name. UserError for a function that does not exist,
    and for a model of LiteLLM without LiteLLM, or of a provider that it does not know.
    """
    return {
        role: who if is_untrained(who) else policy_of(who) or _create_backend(role, who, run_seed)
        for role, who in roles.items()
    }


def _create_backend(role: str, who: str, run_seed: int) -> Backend:
    if who.startswith(FUNCTION):
        respond = load_function(role, who.removeprefix(FUNCTION))
    else:
        litellm.check_model(role, who)
        respond = partial(_by_model, who)
    return lambda example: ReplyBackend(who, respond, example, run_seed).answer


@dataclass(frozen=True, slots=True)
class ReplyBackend:
    """The backend of a role that no policy answers, in a rollout of `example`."""

    who: str
    respond: Respond
    example: Example
    run_seed: int

    async def answer(self, request: Request, call: CallId, memory: Memory) -> Completion:
        """Return the completion, recorded like a policy's, so that it is never paid for twice.

        Nothing is sampled with the seed. It only tells a rollout that is played again after a
        failure from a rollout that is started again.
        """
        started, sha = datetime.now(UTC), request_sha(request)
        again = memory.recall(call, request, sha, self.who)
        if again is not None:
            return again
        seed = call.seed(self.run_seed)
        memory.begin(Begun(call, sha, self.who, seed, started))
        reply = await self.respond(request, self.example)
        return Completion(
            id=call,
            response_id=call.response_id,
            request=request,
            seed=seed,
            finish_reason=reply.finish_reason,
            message=call.name_tool_calls(reply.message),
            policy_version=self.who,
            started=started,
            ended=datetime.now(UTC),
            request_sha=sha,
            usage=reply.usage,
        )


async def _by_model(model: str, request: Request, _: Example) -> Reply:
    """Ask a model with the client's fields, under OpenAI's names whatever the dialect."""
    fields = {**request.fields, **to_chat_fields(request)}
    return await litellm.complete(model, request.messages, request.tools, fields)


def load_function(role: str, name: str) -> Respond:
    """Load the function that answers `role`: `package.module:name`, or `file:name` of `agents/`.

    The function gets the messages and the example as plain values, and returns a text or a whole
    message with its tool calls. A function that is not async runs in a thread of its own.
    """
    module_name, _, attribute = name.partition(":")
    module = load_module(module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        lacks = f"has no function {attribute!r}" if module else "cannot be imported"
        raise UserError(
            f"the role {role} is answered by {name}, and {module_name} {lacks}; "
            "name a function of a file of agents/, or of a module that can be imported"
        )
    return partial(_by_function, function, name)


async def _by_function(
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
            answer: Message = {"role": "assistant", "content": content}
            return {**answer, "tool_calls": calls} if calls else answer
    text = f"The function {name} returned {said!r}; a text or an assistant's message is needed."
    raise Refused(500, text, code="function_failed")


def _is_call(call: object) -> bool:
    function = Fields(Fields(call).get("function"))
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str)


DIFFERS = "differs"
"""Code of the refusal of a request that differs from the recorded request."""

UNRECORDED_SETTINGS = (
    "The messages and the tools are equal; what differs is the sampling, the most tokens, the stop "
    "strings or the format, which are not recorded."
)


@dataclass
class RecordedBackend:
    """Backend of a role of a recorded rollout: what its calls were answered, and refused.

    From the first request that differs, what differs is answered by `onward` or, without it,
    refused. `most_tokens` is the recipe's bound of an answer.
    """

    role: str
    recorded: Mapping[int, Completion]
    refused: Sequence[RefusedCall]
    most_tokens: int
    onward: Answer | None = None
    answered: list[int] = field(default_factory=list[int])
    """Calls that were answered."""
    recalled: int = 0
    """How many of them were answered from the record."""
    difference: str = ""
    """How the first request that differs does so; empty if none has."""
    _refused: int = 0

    async def answer(self, request: Request, call: CallId, memory: Memory) -> Completion:
        """Answer from the record as a rollout that is started anew is; then as `onward` does."""
        recorded = self.recorded.get(call.number)
        if recorded is None and not self.difference and self._refused < len(self.refused):
            self._refused += 1
            again = self.refused[self._refused - 1]
            raise Refused(again.status, again.message, code=again.code)
        if recorded is not None:
            sampling = recorded.sampling  # None if no policy answered the call
            asked = sampling and replace(sampling, max_tokens=self.most_tokens)
            sha = request_sha(request, asked)
            if found := memory.recall(call, request, sha, recorded.policy_version):
                self.recalled += 1
                self.answered.append(call.number)
                return found
        self.difference = self.difference or self._describe(call, request, recorded)
        if self.onward is None:
            text = f"Call {call.number} of the role {self.role} differs from the recorded rollout's"
            raise Refused(400, f"{text}, which is played again without a model.", code=DIFFERS)
        completion = await self.onward(request, call, memory)
        self.answered.append(call.number)
        return completion

    def _describe(self, call: CallId, request: Request, recorded: Completion | None) -> str:
        """Return how a request differs from the recorded request, as a unified diff."""
        name = f"call {call.number} of the role {self.role}"
        before = [] if recorded is None else _lines(recorded.request, recorded.usage is not None)
        now = _lines(request, recorded is not None and recorded.usage is not None)
        titles = f"recorded {name}", f"{name}, as it is asked now"
        diff = "\n".join(difflib.unified_diff(before, now, *titles, lineterm=""))
        head = f"{name} differs from the recorded one:"
        if recorded is None:
            head = f"{name} is one that the recorded rollout has not:"
        return f"{head}\n\n{diff or UNRECORDED_SETTINGS}"


def _lines(request: Request, with_fields: bool) -> list[str]:
    """Write what an answer depends on, a value a line; a policy's does not on all the fields."""
    asked = {"messages": request.messages, "tools": request.tools}
    told = asked | ({"fields": dict(request.fields)} if with_fields else {})
    return json.dumps(told, indent=2, ensure_ascii=False, sort_keys=True).splitlines()
