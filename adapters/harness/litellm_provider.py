"""`ratchet/<role>`: LiteLLM's way to the rollout that is being played in this process."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from litellm.llms.custom_llm import CustomLLM, CustomLLMError
from litellm.types.utils import ModelResponse, ModelResponseStream
from litellm.utils import custom_llm_setup

from adapters.calls import Refused
from adapters.harness.current_rollout import ask_role, await_role
from adapters.litellm import loaded

PROVIDER = "ratchet"
CAN = (
    "supports_function_calling",
    "supports_parallel_function_calling",
    "supports_response_schema",
    "supports_tool_choice",
)


def provide(roles: Iterable[str]) -> None:
    """Have LiteLLM know `ratchet/<role>`, and that it takes tools and response formats."""
    litellm = loaded()
    if all(item["provider"] != PROVIDER for item in litellm.custom_provider_map):
        item: Any = {"provider": PROVIDER, "custom_handler": Provider()}
        litellm.custom_provider_map.append(item)
    custom_llm_setup()  # LiteLLM itself does so only at a call, and does not know the models before
    model = {"litellm_provider": PROVIDER, "mode": "chat", **dict.fromkeys(CAN, True)}
    litellm.register_model({f"{PROVIDER}/{role}": model for role in roles})


class Provider(CustomLLM):
    """Answers as the door does over HTTP. LiteLLM calls the methods with keywords only.

    A stream is one piece and the end, since the door has the whole answer before it gives any.
    """

    def completion(self, *_: Any, **call: Any) -> ModelResponse:
        try:
            return _response(ask_role(*_asked(call)))
        except Refused as refused:
            raise CustomLLMError(refused.status, refused.message) from refused

    async def acompletion(self, *_: Any, **call: Any) -> ModelResponse:
        try:
            return _response(await await_role(*_asked(call)))
        except Refused as refused:
            raise CustomLLMError(refused.status, refused.message) from refused

    def streaming(self, *_: Any, **call: Any) -> Iterator[Any]:
        yield _chunk(self.completion(**call))

    async def astreaming(  # pyright: ignore[reportIncompatibleMethodOverride]  as LiteLLM uses it
        self, *_: Any, **call: Any
    ) -> AsyncIterator[Any]:
        yield _chunk(await self.acompletion(**call))


def _asked(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the role that a call of LiteLLM asks, and the body of the request."""
    role = call["model"]
    fields = dict(call["optional_params"])
    extra = fields.pop("extra_body", None) or {}
    return role, {"model": role, "messages": call["messages"], **fields, **extra}


def _response(body: dict[str, Any]) -> ModelResponse:
    """With the token ids also where LiteLLM puts those of an answer over HTTP."""
    choices = [
        {**choice, "provider_specific_fields": {"token_ids": choice["token_ids"]}}
        for choice in body["choices"]
    ]
    return ModelResponse(**{**body, "choices": choices})


def _chunk(response: Any) -> ModelResponseStream:
    """All of the answer. LiteLLM itself sends the finish reason, and the usage if asked, after it.

    It loses everything else that comes with a finish and without text.
    """
    body = response.model_dump()
    return ModelResponseStream(**{**body, "choices": [_delta(one) for one in body["choices"]]})


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    delta = choice.pop("message")
    calls = enumerate(delta.get("tool_calls") or ())
    tool_calls = [{"index": index, **call} for index, call in calls] or None
    return {**choice, "delta": {**delta, "tool_calls": tool_calls}}
