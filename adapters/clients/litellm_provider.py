"""LiteLLM's provider `ratchet/<role>`, which calls the rollout that is played in this process."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from litellm.llms.custom_llm import CustomLLM, CustomLLMError
from litellm.types.utils import ModelResponse, ModelResponseStream
from litellm.utils import custom_llm_setup

from ratchet.adapters.calls import Refused
from ratchet.adapters.clients.current_rollout import current_roles
from ratchet.adapters.clients.libraries import tls
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
    roles = current_roles.get(None)
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
