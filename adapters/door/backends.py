"""Backends of roles: a policy, a function of the user's, or a model that LiteLLM reaches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from adapters.calls import (
    Begun,
    Completion,
    Example,
    Message,
    Place,
    Request,
    Usage,
)
from adapters.clients import litellm
from adapters.clients.litellm import Reply
from adapters.dialects.openai_fields import to_chat_fields
from adapters.door.memory import Answer, Memory, request_sha
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
        role: policy_of(who) or _create_backend(role, who, run_seed) for role, who in roles.items()
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

    async def answer(self, request: Request, place: Place, memory: Memory) -> Completion:
        """Return the completion, recorded like a policy's, so that it is never paid for twice.

        Nothing is sampled with the seed. It only tells a rollout that is played again after a
        failure from a rollout that is started again.
        """
        started, sha = datetime.now(UTC), request_sha(request)
        again = memory.recall(place, request, sha, self.who)
        if again is not None:
            return again
        seed = place.seed(self.run_seed)
        memory.begin(Begun(place, sha, self.who, seed, started))
        reply = await self.respond(request, self.example)
        return Completion(
            place=place,
            response_id=f"chatcmpl-{place.name('answer')}",
            request=request,
            seed=seed,
            finish_reason=reply.finish_reason,
            message=_with_ids(reply.message, place),
            policy_version=self.who,
            started=started,
            ended=datetime.now(UTC),
            request_sha=sha,
            usage=Usage(reply.prompt_tokens, reply.completion_tokens, reply.cost),
        )


async def _by_model(model: str, request: Request, _: Example) -> Reply:
    """Ask a model with the client's fields, those of every dialect under OpenAI's names."""
    fields = {**request.fields, **to_chat_fields(request)}
    return await litellm.complete(model, request.messages, request.tools, fields)


def _with_ids(message: Message, place: Place) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": place.name_tool_calls(calls)} if calls else message
