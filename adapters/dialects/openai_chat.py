"""OpenAI's chat completions: a body → a request, a completion → an answer or its chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from adapters.calls import Completion, Message, Request
from adapters.chat import Chat
from adapters.dialects.fields import (
    Body,
    at_least_one,
    bad,
    body_of,
    kind,
    listed,
    stops,
    text_of,
    typed,
)
from adapters.dialects.openai_fields import check_sampling, choice, error, form, logprobs
from adapters.dialects.sse import DONE, data

__all__ = ["answer", "chunks", "error", "lines", "models", "read"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_ANSWERS = 8


def read(body: object) -> Request:
    """The request in a parsed body. What cannot be honoured and would mislead is refused."""
    sent = body_of(body)
    _check_fields(sent)
    tools = [_tool(tool, i) for i, tool in enumerate(listed(sent, "tools"))]
    return Request(
        model=sent["model"],
        messages=_messages(sent),
        tools=tools,
        max_tokens=at_least_one(sent, "max_completion_tokens", "max_tokens"),
        stop=stops(sent, "stop"),
        fields={k: v for k, v in sent.items() if k not in ("messages", "tools", "model")},
        format=form(sent.get("response_format"), "response_format"),
        choice=choice(sent, tools),
        answers=_answers(sent),
    )


def answer(completion: Completion, chat: Chat, *others: Completion) -> dict[str, Any]:
    """The body of the answer, with the token ids where vLLM puts them; `others`: for n above 1."""
    completions = (completion, *others)
    return {
        **_envelope(completion, "chat.completion"),
        "choices": [_choice(index, one, chat) for index, one in enumerate(completions)],
        "usage": _usage(completions),
        "prompt_token_ids": list(completion.prompt_tokens),
    }


def chunks(completion: Completion, chat: Chat, *others: Completion) -> Iterator[dict[str, Any]]:
    """The same answer in pieces: role, content, tool calls, the finish with its tokens, usage."""
    envelope = _envelope(completion, "chat.completion.chunk")
    if _wants_usage(completion):
        envelope["usage"] = None
    for index, one in enumerate((completion, *others)):
        for piece, of_choice in _pieces(one, chat):
            shown = {"index": index, "delta": piece, "finish_reason": None, "logprobs": None}
            yield {**envelope, "choices": [shown | of_choice], **_prompt(one, piece)}
    if _wants_usage(completion):
        yield {**envelope, "choices": [], "usage": _usage((completion, *others))}


def lines(completion: Completion, chat: Chat, *others: Completion) -> Iterator[str]:
    """The chunks as they go over the wire."""
    yield from map(data, chunks(completion, chat, *others))
    yield DONE


def models(name: str) -> dict[str, Any]:
    """The list of the one model there is, as OpenAI's clients read it and Anthropic's."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ratchet"}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}


def _choice(index: int, completion: Completion, chat: Chat) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"refusal": None, **_visible(completion.message)},
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion, chat),
        "token_ids": list(completion.sampled_tokens),
    }


def _pieces(completion: Completion, chat: Chat) -> Iterator[tuple[Message, dict[str, Any]]]:
    """The deltas, each with what else its choice has."""
    message = completion.message
    yield {"role": "assistant", "content": ""}, {}
    for key in ("reasoning_content", "content"):
        if message.get(key):
            yield {key: message[key]}, {}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call}]}, {}
    yield (
        {},
        {
            "finish_reason": completion.finish_reason,
            "logprobs": _logprobs(completion, chat),
            "token_ids": list(completion.sampled_tokens),
        },
    )


def _prompt(completion: Completion, piece: Message) -> dict[str, Any]:
    """Beside the role, which comes first, the prompt."""
    return {"prompt_token_ids": list(completion.prompt_tokens)} if "role" in piece else {}


def _envelope(completion: Completion, kind: str) -> dict[str, Any]:
    return {
        "id": completion.response_id,
        "object": kind,
        "created": int(completion.ended.timestamp()),
        "model": completion.request.model,
        "system_fingerprint": completion.policy_version,
    }


def _visible(message: Message) -> Message:
    """OpenAI's own has no text beside nothing but tool calls."""
    return {**message, "content": message["content"] or None}


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    """One prompt, and all that was sampled from it."""
    prompt, _ = completions[0].counted
    sampled = sum(completion.counted[1] for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _logprobs(completion: Completion, chat: Chat) -> dict[str, Any] | None:
    if not completion.request.fields.get("logprobs"):
        return None
    return {"content": logprobs(completion, chat), "refusal": None}


def _wants_usage(completion: Completion) -> bool:
    options = completion.request.fields.get("stream_options")
    return bool(options and options.get("include_usage"))


def _check_fields(body: Body) -> None:
    check_sampling(body)
    typed(body, "logprobs", bool, "a boolean")
    typed(body, "stream_options", dict, "an object")
    for name in ("functions", "function_call"):
        if body.get(name):
            raise bad(f"{name} is the old form of tools and is not read here; send tools.", name)
    if "audio" in listed(body, "modalities"):
        raise bad("modalities asks for audio; this endpoint answers in text.", "modalities")


def _answers(body: Body) -> int:
    many = at_least_one(body, "n") or 1
    if many > MOST_ANSWERS:
        raise bad(f"n is {many}; a call gets up to {MOST_ANSWERS} answers here.", "n")
    return many


def _tool(tool: Any, index: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        where = f"tools[{index}]"
        raise bad(f'{where} is not {{"type": "function", "function": {{"name": …}}}}.', where)
    return tool


def _messages(body: Body) -> list[Message]:
    messages = listed(body, "messages")
    if not messages:
        raise bad("There are no messages; send at least one.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    """The message with its content as text and nothing that a renderer does not read."""
    if not isinstance(message, dict):
        raise bad(f"{where} is {kind(message)}; a message is an object.", where)
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role is {role!r}; it is one of {', '.join(ROLES)}.", f"{where}.role")
    read: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), role, f"{where}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    calls = listed(message, "tool_calls", f"{where}.") if role == "assistant" else []
    if calls:
        read["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return read


def _content(content: Any, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    return text_of(content, ("text", "refusal"), where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise bad(f"{where} has no function with a name and arguments.", where)
    written = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **written} if isinstance(call.get("id"), str) else written
