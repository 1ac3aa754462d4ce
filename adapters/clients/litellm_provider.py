"""LiteLLM's provider `ratchet/<role>`, which calls the rollout that is played in this process."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from litellm.llms.custom_llm import CustomLLM, CustomLLMError
from litellm.types.utils import ModelResponse, ModelResponseStream
from litellm.utils import custom_llm_setup

from ratchet.adapters.calls import Refused
from ratchet.adapters.clients.current_rollout import ask_role, await_role
from ratchet.adapters.clients.litellm import import_litellm

PROVIDER = "ratchet"
CAN = (
    "supports_function_calling",
    "supports_parallel_function_calling",
    "supports_response_schema",
    "supports_tool_choice",
)


def provide(roles: Iterable[str]) -> None:
    """Register the models `ratchet/<role>`, with tools and response formats, with LiteLLM."""
    litellm = import_litellm()
    if all(item["provider"] != PROVIDER for item in litellm.custom_provider_map):
        item = {"provider": PROVIDER, "custom_handler": Provider()}
        litellm.custom_provider_map.append(item)
    custom_llm_setup()  # LiteLLM itself does so at a call only, and knows no models before it
    model = {"litellm_provider": PROVIDER, "mode": "chat", **dict.fromkeys(CAN, True)}
    litellm.register_model({f"{PROVIDER}/{role}": model for role in roles})


class Provider(CustomLLM):
    """A provider that answers as the door does over HTTP. LiteLLM calls it with keywords only.

    A stream is one piece and its end, since the door has the whole answer before it sends any.
    """

    def completion(self, *_: object, **call: Any) -> ModelResponse:
        try:
            return _read_response(ask_role(*_asked(call)))
        except Refused as refused:
            raise CustomLLMError(refused.status, refused.message) from refused

    async def acompletion(self, *_: object, **call: Any) -> ModelResponse:
        try:
            return _read_response(await await_role(*_asked(call)))
        except Refused as refused:
            raise CustomLLMError(refused.status, refused.message) from refused

    def streaming(  # pyright: ignore[reportIncompatibleMethodOverride]  as LiteLLM uses it
        self, *_: object, **call: Any
    ) -> Iterator[ModelResponseStream]:
        yield _write_chunk(self.completion(**call))

    async def astreaming(  # pyright: ignore[reportIncompatibleMethodOverride]  as LiteLLM uses it
        self, *_: object, **call: Any
    ) -> AsyncIterator[ModelResponseStream]:
        yield _write_chunk(await self.acompletion(**call))


def _asked(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the role that a call of LiteLLM asks, and the body of the request."""
    role = call["model"]
    fields = dict(call["optional_params"])
    extra = fields.pop("extra_body", None) or {}
    return role, {"model": role, "messages": call["messages"], **fields, **extra}


def _read_response(body: dict[str, Any]) -> ModelResponse:
    """Read the answer; LiteLLM has a choice's token ids, if asked for, in a second place too."""
    choices = [
        {**choice, "provider_specific_fields": {"token_ids": choice["token_ids"]}}
        if "token_ids" in choice
        else choice
        for choice in body["choices"]
    ]
    return ModelResponse(**{**body, "choices": choices})


def _write_chunk(response: ModelResponse) -> ModelResponseStream:
    """Write all of the answer as one chunk.

    LiteLLM itself then sends the finish reason, and the usage if it is asked for. It drops every
    other field of a chunk that has a finish reason and no text.
    """
    body = response.model_dump()
    return ModelResponseStream(**{**body, "choices": [_delta(one) for one in body["choices"]]})


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    delta = choice.pop("message")
    calls = enumerate(delta.get("tool_calls") or ())
    tool_calls = [{"index": index, **call} for index, call in calls] or None
    return {**choice, "delta": {**delta, "tool_calls": tool_calls}}
