"""Any model that LiteLLM reaches, asked as a helper: a conversation → its answer and its cost."""

import asyncio
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from adapters.calls import Message, Refused
from adapters.errors import UserError
from adapters.silence import keep_silent

LONGEST_SECONDS = 300
"""A rollout cannot end while a call of it is under way; LiteLLM by itself would wait for hours."""

PASSED_ON = (
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
    "seed",
    "stop",
    "temperature",
    "tool_choice",
    "top_p",
)
"""The fields of a client that reach the helper. Not `api_base`: the key would go there too."""

READ = ("role", "content", "name", "tool_calls", "tool_call_id")
"""What providers know of a message; some refuse one with anything more."""


class LiteLLMMissing(UserError):
    """LiteLLM is an extra."""


@dataclass(frozen=True, slots=True)
class Helped:
    """A helper's answer; `cost` is in US dollars, None where LiteLLM knows no price."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


async def complete(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    fields: Mapping[str, Any],
) -> Helped:
    """The answer of a model such as `openai/gpt-4o-mini`; its API key is in the environment.

    Raises Refused with 503 where the same request may succeed later, else with 400.
    """
    litellm = await asyncio.to_thread(loaded)
    asked = {name: fields[name] for name in PASSED_ON if fields.get(name) is not None}
    try:
        response = await litellm.acompletion(
            model=model,
            messages=[_sent(message) for message in messages],
            tools=list(tools) or None,
            timeout=LONGEST_SECONDS,
            # Tools are the agent's own. Without this, LiteLLM looks for MCP servers among them,
            # and from 1.103 on it fails to import beside the mcp 1.x that CrewAI needs.
            _skip_mcp_handler=True,
            **asked,
        )
    except openai.OpenAIError as error:  # all of LiteLLM's errors are kinds of it
        raise _refusal(model, error) from error
    return _helped(response)


@functools.cache
def loaded() -> Any:
    """The package. It takes seconds to import, so it is imported only where it is needed.

    Raises LiteLLMMissing where it is not installed.
    """
    keep_silent()
    try:
        litellm: Any = importlib.import_module("litellm")
    except ModuleNotFoundError as error:
        text = "LiteLLM is not installed, and a role is answered by it; "
        raise LiteLLMMissing(f"{text}install ratchet-rl[agents]") from error
    litellm.telemetry = False
    litellm.suppress_debug_info = True  # it would print to stdout on every error
    litellm.disable_hf_tokenizer_download = True  # to count tokens that a provider did not count
    return litellm


def _sent(message: Message) -> Message:
    """The message as providers take it: tool arguments are text."""
    sent = {name: message[name] for name in READ if name in message}
    if sent.get("tool_calls"):
        sent["tool_calls"] = [_call(call) for call in sent["tool_calls"]]
    return sent


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**call, "function": {"name": function["name"], "arguments": written}}


def _helped(response: Any) -> Helped:
    choice, usage = response.choices[0], response.usage
    return Helped(
        message=_message(choice.message),
        finish_reason=choice.finish_reason or "stop",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cost=response._hidden_params.get("response_cost"),
    )


def _message(answered: Any) -> Message:
    message: Message = {"role": "assistant", "content": answered.content or ""}
    if answered.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in answered.tool_calls
        ]
    reasoning = getattr(answered, "reasoning_content", None)
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _refusal(model: str, error: openai.OpenAIError) -> Refused:
    """Not in the provider's words where it refused the key: they may spell part of it."""
    status = getattr(error, "status_code", 503)
    if status in (401, 403):
        text = f"The helper {model} refused its API key; set the right one in the environment."
        return Refused(400, text, code="helper_key")
    said = f"({type(error).__name__}: {getattr(error, 'message', error)})"
    if status < 500 and status not in (408, 409, 429):
        return Refused(400, f"The helper {model} refused the request {said}.", code="helper")
    text = f"The helper {model} could not answer {said}; try again."
    return Refused(503, text, code="helper_unavailable")
