"""Calls of any model that LiteLLM reaches, for the roles that no policy answers.

It is one of a provider, `provider/model`, or of a server that speaks OpenAI's API, `URL#MODEL`.
"""

import asyncio
import functools
import importlib
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import openai

from ratchet.adapters.calls import Message, Refused, Tool, ToolCall, Usage
from ratchet.adapters.clients.libraries import keep_silent
from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import check_listener, check_place
from ratchet.adapters.network.answers import bounded_client
from ratchet.adapters.redaction import cut

if TYPE_CHECKING:  # LiteLLM is an extra and takes seconds to import
    from litellm.types.utils import ChatCompletionMessageToolCall, ModelResponse

LONGEST_SECONDS = 300
"""The timeout of a call: a rollout cannot end during one, and LiteLLM would wait for hours."""

BY_URL, SERVER_KEY = "hosted_vllm", "RATCHET_SERVER_KEY"
"""LiteLLM's provider of servers by URL, and the variable of their key: no provider's key is sent
to a server that a recipe names."""
HTTP_CLIENT = "litellm.llms.custom_httpx.http_handler"

PASSED_FIELDS = (
    *("frequency_penalty", "logit_bias", "max_tokens", "parallel_tool_calls", "presence_penalty"),
    *("reasoning_effort", "response_format", "seed", "stop", "temperature", "tool_choice"),
    "top_p",
)
"""The client's fields that reach the model. Not `api_base`: the key would be sent there."""

QUIET = {
    "telemetry": False,
    "suppress_debug_info": True,  # it would print to stdout on every error
    "disable_hf_tokenizer_download": True,  # to count tokens that a provider did not count
}
"""LiteLLM's own settings, as attributes of the package."""

ENDS = (openai.OpenAIError, TimeoutError, LookupError)
"""Ends of a call without an answer: LiteLLM's own errors, no end in time, and no choice."""

_failed: set[tuple[str, str | None]] = set()
"""Models that have failed, each with the code of its refusal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that no policy gave; its cost is None if LiteLLM knows no price."""

    message: Message
    finish_reason: str
    usage: Usage


async def complete(
    model: str, messages: Sequence[Message], tools: Sequence[Tool], fields: Mapping[str, object]
) -> Reply:
    """Return the answer of a model such as `openai/gpt-4o-mini`; its API key is in the environment.

    A model of a server is `URL#MODEL`, such as `http://127.0.0.1:8000/v1#qwen`.

    Raise Refused, with 503 if the same request may succeed later and with 400 otherwise. The first
    failure of each kind is logged, since only the rollouts' rows have the others.
    """
    litellm = await asyncio.to_thread(import_litellm)
    asked = {name: fields[name] for name in PASSED_FIELDS if fields.get(name) is not None}
    try:
        async with _address(model) as address, asyncio.timeout(LONGEST_SECONDS):
            response = await litellm.acompletion(
                **address,
                messages=[_to_provider(message) for message in messages],
                tools=list(tools) or None,
                timeout=LONGEST_SECONDS,
                # Tools are the agent's own. Without this, LiteLLM looks for MCP servers among them,
                # and from 1.103 on it fails to import beside the mcp 1.x that CrewAI needs.
                _skip_mcp_handler=True,
                **asked,
            )
        return _read_reply(response)
    except ENDS as error:
        refused = _refusal(model, error)
        if (model, refused.code) not in _failed:
            _failed.add((model, refused.code))
            log.warning("%s Rollouts that ask it may fail; this is said once", refused)
        raise refused from error


@asynccontextmanager
async def _address(model: str) -> AsyncIterator[dict[str, Any]]:
    """Yield where LiteLLM finds a model and, for a server, the client that asks it."""
    url, of_server, name = model.partition("#")
    if "://" not in model or not of_server:
        yield {"model": model}
        return
    key = os.environ.get(SERVER_KEY) or "none"  # without one LiteLLM would send another key
    asking = importlib.import_module(HTTP_CLIENT).AsyncHTTPHandler()
    async with bounded_client(url, LONGEST_SECONDS) as asking.client:
        asking.create_client = lambda **_: asking.client  # to try again
        yield {"model": f"{BY_URL}/{name}", "api_base": url, "api_key": key, "client": asking}


def check_model(role: str, model: str) -> None:
    """Raise UserError if LiteLLM does not know the provider of a role's model.

    Raise it too if nothing listens at a model's URL, or if the URL is open to a network.
    """
    litellm = import_litellm()
    if "://" in model:
        said = f"the role {role} is answered by"
        try:
            url = check_place(model)
        except ValueError as error:
            raise UserError(f"{said} {model}, but {error}") from error
        remedy = "start that server, or mend its URL, which has the path of its API, such as /v1"
        check_listener(url, f"{said} {model}, which", remedy)
        return
    try:
        litellm.get_llm_provider(model)
    except openai.OpenAIError as error:
        raise UserError(
            f"the role {role} is answered by {model!r}, and LiteLLM knows no provider "
            f"{model.partition('/')[0]!r}; name one as provider/model, such as openai/gpt-4o-mini"
        ) from error


@functools.cache
def import_litellm() -> ModuleType:
    """Import LiteLLM, which takes seconds, and set it to be quiet; UserError without it."""
    keep_silent()
    try:
        litellm = importlib.import_module("litellm")
    except ModuleNotFoundError as error:
        text = "LiteLLM is not installed, and a role is answered by it; "
        raise UserError(f"{text}install ratchet-rl[agents]") from error
    for name, value in QUIET.items():
        setattr(litellm, name, value)
    return litellm


def _to_provider(message: Message) -> Message:
    """Copy the message without `reasoning_content`, which some providers refuse."""
    sent = message.copy()
    sent.pop("reasoning_content", None)
    calls = list[ToolCall]()
    for call in sent.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {"name": name, "arguments": written}})
    if calls:
        sent["tool_calls"] = calls
    return sent


def _read_reply(response: "ModelResponse") -> Reply:
    choice, usage = response.choices[0], response.usage  # pyright: ignore
    answered = choice.message
    message: Message = {"role": "assistant", "content": answered.content or ""}
    if answered.tool_calls:
        message["tool_calls"] = [_read_call(call) for call in answered.tool_calls]  # pyright: ignore
    if reasoning := getattr(answered, "reasoning_content", None):
        message["reasoning_content"] = reasoning
    cost = response._hidden_params.get("response_cost")
    counted = Usage(usage.prompt_tokens, usage.completion_tokens, cost)
    return Reply(message, choice.finish_reason or "stop", counted)


def _read_call(call: "ChatCompletionMessageToolCall") -> ToolCall:
    name, arguments = cast(str, call.function.name), call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _refusal(model: str, error: Exception) -> Refused:
    """Translate an error, but leave out the text of an error about the key, which may show it."""
    status = getattr(error, "status_code", 503)
    if status in (401, 403):
        key = SERVER_KEY if "://" in model else "the right one"
        text = f"The helper {model} refused its API key; set {key} in the environment."
        return Refused(400, text, code="helper_key")
    said = f"({type(error).__name__}: {cut(str(getattr(error, 'message', error)))})"
    if status < 500 and status not in (408, 409, 429):
        return Refused(400, f"The helper {model} refused the request {said}.", code="helper")
    text = f"The helper {model} could not answer {said}; try again."
    return Refused(503, text, code="helper_unavailable")
