"""Backends of roles: a policy, a function of the user's, or a model that LiteLLM reaches."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from adapters.calls import (
    Begun,
    Completion,
    Example,
    JsonObject,
    Message,
    Place,
    Request,
    ToolCall,
)
from adapters.clients import litellm
from adapters.clients.litellm import Reply
from adapters.dialects.openai_fields import to_chat_fields
from adapters.door.recorded import Answer, Memory
from adapters.door.roles import FUNCTION, policy_of
from adapters.door.scripted import Respond, load_function

Backend = Callable[[Example], Answer]
"""Creates what answers the calls of a role in a rollout of this example."""


def create_backends(roles: Mapping[str, str], run_seed: int) -> dict[str, Backend | str]:
    """Return each role's backend, by a recipe's `roles`; for a policy its name.

    A function that does not exist raises ScriptError, a model of LiteLLM LiteLLMMissing where
    that is not installed, and one of a provider that LiteLLM does not know NoProvider.
    """
    return {
        role: policy_of(who) or _create_backend(who, _load_respond(role, who), run_seed)
        for role, who in roles.items()
    }


def _load_respond(role: str, who: str) -> Respond:
    if who.startswith(FUNCTION):
        return load_function(role, who.removeprefix(FUNCTION))
    litellm.check_model(role, who)
    return partial(_by_model, who)


def _create_backend(who: str, respond: Respond, run_seed: int) -> Backend:
    return lambda example: ReplyBackend(who, respond, example, run_seed).answer


@dataclass(frozen=True, slots=True)
class ReplyBackend:
    """The backend of a role that no policy answers, in a rollout of `example`."""

    who: str
    respond: Respond
    example: Example
    run_seed: int

    async def answer(self, request: Request, place: Place, memory: Memory) -> Completion:
        """Return the completion, recorded like a policy's, so that it is never paid for twice.

        Nothing is sampled with the seed. It only tells a rollout that is played again after a
        failure from a rollout that is started again.
        """
        started, sha = datetime.now(UTC), _request_sha(request)
        again = memory.recorded.answer(place, request, sha, self.who)
        if again is not None:
            return again
        seed = place.seed(self.run_seed)
        memory.begin(Begun(place, sha, self.who, seed, started))
        reply = await self.respond(request, self.example)
        return Completion(
            place=place,
            response_id=f"chatcmpl-{place.name('answer')}",
            request=request,
            sampling=None,
            seed=seed,
            prompt_token_ids=[],
            prefix_len=0,
            prefix_call=None,
            prefix_how="",
            response_token_ids=[],
            logprobs=[],
            finish_reason=reply.finish_reason,
            message=_with_ids(reply.message, place),
            policy_version=self.who,
            renderer="",
            tokenizer_sha="",
            started=started,
            ended=datetime.now(UTC),
            request_sha=sha,
            usage=reply.usage,
        )


async def _by_model(model: str, request: Request, _: Example) -> Reply:
    return await litellm.complete(model, request.messages, request.tools, _fields(request))


def _with_ids(message: Message, place: Place) -> Message:
    """Give each tool call without an id one that is the same whenever this call is made again."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    name = place.name("tool call")
    named: list[ToolCall] = [
        {"id": f"call_{name}{index}", "type": "function", **call}
        for index, call in enumerate(calls)
    ]
    return {**message, "tool_calls": named}


def _fields(request: Request) -> JsonObject:
    """Return the client's fields, with those that dialects name differently in OpenAI's names."""
    return {**request.fields, **to_chat_fields(request)}


def _request_sha(request: Request) -> str:
    """Hash the whole request by SHA-256, since any of it may change the answer."""
    asked = [request.messages, request.tools, request.max_tokens, request.stop, request.fields]
    canonical = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
