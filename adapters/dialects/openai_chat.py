"""OpenAI's chat completions: bodies read as requests, completions written as answers or chunks."""

from collections.abc import Iterator, Sequence
from typing import cast

from adapters.calls import Completion, JsonObject, Message, Request, Tool, ToolCall
from adapters.dialects.fields import (
    TOKENS,
    Body,
    bad_request,
    check_body,
    create_tool_call,
    json_type,
    read_count,
    read_field,
    read_list,
    read_stops,
    read_text,
    write_prompt_tokens,
    write_sampled_tokens,
)
from adapters.dialects.openai_fields import (
    check_sampling,
    read_choice,
    read_format,
    write_error,
    write_logprobs,
)
from adapters.dialects.sse import DONE, write_data
from adapters.rendering.chat import Chat

__all__ = ["answer", "chunks", "models", "read", "stream", "write_error"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_ANSWERS = 8


def read(body: object) -> Request:
    """Read the request in a parsed body; a field that cannot be honoured is refused."""
    sent, model = check_body(body)
    _check_fields(sent)
    tools = [_read_tool(tool, i) for i, tool in enumerate(read_list(sent, "tools"))]
    return Request(
        model=model,
        messages=_read_messages(sent),
        tools=tools,
        max_tokens=read_count(sent, "max_completion_tokens", "max_tokens"),
        stop=read_stops(sent, "stop"),
        fields={k: v for k, v in sent.items() if k not in ("messages", "tools", "model")},
        format=read_format(sent.get("response_format"), "response_format"),
        choice=read_choice(sent, tools),
        answers=_count_answers(sent),
    )


def answer(completion: Completion, chat: Chat, *others: Completion) -> JsonObject:
    """Write the body of the answer, with the token ids, if asked for, where vLLM has them.

    `others` are the completions beyond the first of a request with n above 1.
    """
    completions = (completion, *others)
    return {
        **_envelope(completion, "chat.completion"),
        "choices": [_choice(index, one, chat) for index, one in enumerate(completions)],
        "usage": _usage(completions),
        **write_prompt_tokens(completion),
    }


def chunks(completion: Completion, chat: Chat, *others: Completion) -> Iterator[JsonObject]:
    """Yield the answer in pieces: role, content, tool calls, the finish with its tokens, usage."""
    envelope = _envelope(completion, "chat.completion.chunk")
    if _wants_usage(completion):
        envelope["usage"] = None
    for index, one in enumerate((completion, *others)):
        for piece, of_choice in _pieces(one, chat):
            shown = {"index": index, "delta": piece, "finish_reason": None, "logprobs": None}
            prompt = write_prompt_tokens(one) if "role" in piece else {}  # in the first piece alone
            yield {**envelope, "choices": [shown | of_choice], **prompt}
    if _wants_usage(completion):
        yield {**envelope, "choices": [], "usage": _usage((completion, *others))}


def stream(completion: Completion, chat: Chat, *others: Completion) -> Iterator[str]:
    """Yield the lines of the chunks."""
    yield from map(write_data, chunks(completion, chat, *others))
    yield DONE


def models(name: str) -> JsonObject:
    """Write the list of the only model in a form that OpenAI's and Anthropic's clients read."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ratchet"}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}


def _choice(index: int, completion: Completion, chat: Chat) -> JsonObject:
    return {
        "index": index,
        "message": {"refusal": None, **_visible(completion.message)},
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion, chat),
        **write_sampled_tokens(completion),
    }


def _pieces(completion: Completion, chat: Chat) -> Iterator[tuple[JsonObject, JsonObject]]:
    """Yield the deltas, each with the further fields of its choice."""
    message = completion.message
    yield {"role": "assistant", "content": ""}, {}
    for key in ("reasoning_content", "content"):
        if text := message.get(key):
            yield {key: text}, {}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call}]}, {}
    yield (
        {},
        {
            "finish_reason": completion.finish_reason,
            "logprobs": _logprobs(completion, chat),
            **write_sampled_tokens(completion),
        },
    )


def _envelope(completion: Completion, kind: str) -> JsonObject:
    return {
        "id": completion.response_id,
        "object": kind,
        "created": int(completion.ended.timestamp()),
        "model": completion.request.model,
        "system_fingerprint": completion.policy_version,
    }


def _visible(message: Message) -> JsonObject:
    """Copy the message with null for an empty content, as OpenAI has it beside tool calls."""
    return {**message, "content": message["content"] or None}


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Count the prompt once, and the tokens of every answer."""
    prompt, _ = completions[0].token_counts
    sampled = sum(completion.token_counts[1] for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _logprobs(completion: Completion, chat: Chat) -> JsonObject | None:
    if not completion.request.fields.get("logprobs"):
        return None
    return {"content": write_logprobs(completion, chat), "refusal": None}


def _wants_usage(completion: Completion) -> bool:
    options = completion.request.fields.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _check_fields(body: Body) -> None:
    check_sampling(body)
    read_field(body, TOKENS, bool, "a boolean")
    read_field(body, "logprobs", bool, "a boolean")
    read_field(body, "stream_options", dict, "an object")
    for name in ("functions", "function_call"):
        if body.get(name):
            raise bad_request(
                f"{name} is the old form of tools and is not read here; send tools.", name
            )
    if "audio" in read_list(body, "modalities"):
        raise bad_request("modalities asks for audio; this endpoint answers in text.", "modalities")


def _count_answers(body: Body) -> int:
    many = read_count(body, "n") or 1
    if many > MOST_ANSWERS:
        raise bad_request(f"n is {many}; a call gets up to {MOST_ANSWERS} answers here.", "n")
    return many


def _read_tool(tool: object, index: int) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(tool, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        where = f"tools[{index}]"
        text = f'{where} is not {{"type": "function", "function": {{"name": …}}}}.'
        raise bad_request(text, where)
    return cast(Tool, tool)  # the client's own, with fields that it may have beside


def _read_messages(body: Body) -> list[Message]:
    messages = read_list(body, "messages")
    if not messages:
        raise bad_request("There are no messages; send at least one.", "messages")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: object, where: str) -> Message:
    """Read a message: its content as text, and the fields that a renderer reads."""
    if not isinstance(message, dict):
        raise bad_request(f"{where} is {json_type(message)}; a message is an object.", where)
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(
            f"{where}.role is {role!r}; it is one of {', '.join(ROLES)}.", f"{where}.role"
        )
    read: Message = {
        "role": "system" if role == "developer" else role,
        "content": _read_content(message.get("content"), role, f"{where}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    calls = read_list(message, "tool_calls", f"{where}.") if role == "assistant" else []
    if calls:
        read["tool_calls"] = [
            _read_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)
        ]
    return read


def _read_content(content: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    return read_text(content, ("text", "refusal"), where)


def _read_call(call: object, where: str) -> ToolCall:
    sent = call if isinstance(call, dict) else {}
    function = sent.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise bad_request(f"{where} has no function with a name and arguments.", where)
    return create_tool_call(name, arguments, sent.get("id"))
