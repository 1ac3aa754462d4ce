"""Who answers a role: a policy, a scripted function, or a model that LiteLLM reaches."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from typing import Any

from adapters import litellm
from adapters.calls import Begun, Completion, Example, Message, Place, Request, Usage
from adapters.dialects.openai_fields import spelt
from adapters.door.recorded import Answer, Memory
from adapters.door.roles import FUNCTION, policy_of
from adapters.door.scripted import Reply, scripted
from adapters.litellm import Helped

Backend = Callable[[Example], Answer]
"""What answers the calls of a role in a rollout of this example."""


def create_backends(roles: Mapping[str, str], run_seed: int) -> dict[str, Backend | str]:
    """Return each role's backend, by a recipe's `roles`; for a policy its name.

    A function that does not exist raises ScriptError, and a model of LiteLLM raises LiteLLMMissing
    where LiteLLM is not installed.
    """
    return {
        role: policy_of(who) or _backend(who, _reply(role, who), run_seed)
        for role, who in roles.items()
    }


def _reply(role: str, who: str) -> Reply:
    if who.startswith(FUNCTION):
        return scripted(role, who.removeprefix(FUNCTION))
    if find_spec("litellm") is None:
        litellm.loaded()  # raises LiteLLMMissing
    return partial(_by_model, who)


def _backend(who: str, reply: Reply, run_seed: int) -> Backend:
    return lambda example: ReplyBackend(who, reply, example, run_seed).answer


@dataclass(frozen=True, slots=True)
class ReplyBackend:
    """What answers a role's calls in a rollout of `example` where no policy does."""

    who: str
    reply: Reply
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
        helped = await self.reply(request, self.example)
        return Completion(
            place=place,
            response_id=f"chatcmpl-{place.name('answer')}",
            request=request,
            sampling=None,
            seed=seed,
            prompt_tokens=[],
            prefix_len=0,
            prefix_call=None,
            prefix_how="",
            sampled_tokens=[],
            logprobs=[],
            finish_reason=helped.finish_reason,
            message=_with_ids(helped.message, place),
            policy_version=self.who,
            renderer="",
            tokenizer_sha="",
            started=started,
            ended=datetime.now(UTC),
            request_sha=sha,
            usage=Usage(helped.prompt_tokens, helped.completion_tokens, helped.cost),
        )


async def _by_model(model: str, request: Request, _: Example) -> Helped:
    return await litellm.complete(model, request.messages, request.tools, _fields(request))


def _with_ids(message: Message, place: Place) -> Message:
    """The message; tool calls that have no id get one that is the same whenever it is asked."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    name = place.name("tool call")
    named = [
        {"id": f"call_{name}{index}", "type": "function", **call}
        for index, call in enumerate(calls)
    ]
    return {**message, "tool_calls": named}


def _fields(request: Request) -> dict[str, Any]:
    """The client's own fields, with what every dialect spells otherwise in OpenAI's words."""
    return {**request.fields, **spelt(request)}


def _request_sha(request: Request) -> str:
    """SHA-256 of all that a client can say: which of it an answerer heeds is its own business."""
    asked = [request.messages, request.tools, request.max_tokens, request.stop, request.fields]
    canonical = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
