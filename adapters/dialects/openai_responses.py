"""OpenAI's responses: bodies read as requests, completions written as answers or streams."""

from collections.abc import Iterator
from itertools import count
from typing import NotRequired, TypedDict, cast

from adapters.calls import Completion, JsonObject, Message, Request, Tool, ToolCall, ToolFunction
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
    read_object,
    read_text,
    write_tokens,
)
from adapters.dialects.openai_fields import (
    check_sampling,
    read_choice,
    read_format,
    write_error,
    write_logprobs,
)
from adapters.dialects.sse import write_named
from adapters.rendering.chat import Chat

__all__ = ["answer", "read", "stream", "write_error"]

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"
KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt")
"""Fields that name what OpenAI stores between calls, and the door does not."""
ECHOED: JsonObject = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "max_output_tokens": None,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}
"""The fields of the request that an answer repeats, each with its value if it was not set."""


class Part(TypedDict):
    """A part of an item's content."""

    type: str
    text: str
    annotations: NotRequired[list[object]]
    logprobs: NotRequired[list[JsonObject]]


class Item(TypedDict):
    """An item of an answer: reasoning, text or a tool call."""

    id: NotRequired[str]
    type: str
    status: NotRequired[str]
    role: NotRequired[str]
    summary: NotRequired[list[object]]
    content: NotRequired[list[Part]]
    call_id: NotRequired[str | None]
    name: NotRequired[str]
    arguments: NotRequired[str | JsonObject]


def read(body: object) -> Request:
    """Read the request in a parsed body; a field that cannot be honoured is refused."""
    sent, model = check_body(body)
    _check_fields(sent)
    tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(read_list(sent, "tools"))]
    return Request(
        model=model,
        messages=[*_read_instructions(sent), *_read_messages(sent)],
        tools=tools,
        max_tokens=read_count(sent, "max_output_tokens"),
        stop=[],
        fields={k: v for k, v in sent.items() if k not in ("input", "model")},
        format=read_format(read_object(sent, "text").get("format"), "text.format"),
        choice=read_choice(sent, tools),
    )


def answer(completion: Completion, chat: Chat) -> JsonObject:
    """Write the body of the answer, with the token ids if they were asked for."""
    return _write_answer(completion, _output(completion, chat))


def stream(completion: Completion, chat: Chat) -> Iterator[str]:
    """Yield the lines of the answer's stream, whose pieces are numbered."""
    for number, piece in zip(count(), _pieces(completion, chat), strict=False):
        yield write_named({**piece, "sequence_number": number})


def _check_fields(body: Body) -> None:
    check_sampling(body)
    read_field(body, TOKENS, bool, "a boolean")
    read_list(body, "include")
    for name in ("store", "background"):
        read_field(body, name, bool, "a boolean")
    for name in KEPT_ELSEWHERE:
        if body.get(name) is not None:
            text = f"{name} is set; nothing is kept here between calls, so send all items as input."
            raise bad_request(text, name)
    if body.get("background"):
        text = "background is true; a call here is answered while its client waits."
        raise bad_request(text, "background")


def _read_instructions(body: Body) -> list[Message]:
    text = read_field(body, "instructions", str, "a string")
    return [{"role": "system", "content": text}] if text else []


def _read_messages(body: Body) -> list[Message]:
    sent = body.get("input")
    if isinstance(sent, str):
        return [{"role": "user", "content": sent}]
    items = read_list(body, "input")
    if not items:
        raise bad_request("There is no input; send a text or an array of items.", "input")
    messages: list[Message] = []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[Message], item: object, where: str) -> None:
    """Add an item as a message or to the last one: an assistant's turn is one message."""
    if not isinstance(item, dict):
        raise bad_request(f"{where} is {json_type(item)}; an item is an object.", where)
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            _turn(messages, begins=True)["reasoning_content"] = _read_reasoning(item, where)
        case "function_call":
            _turn(messages).setdefault("tool_calls", []).append(_read_call(item, where))
        case "function_call_output":
            content = read_text(item.get("output"), PARTS, f"{where}.output")
            name = read_field(item, "call_id", str, "a string", f"{where}.") or ""
            messages.append({"role": "tool", "content": content, "tool_call_id": name})
        case other:
            text = f"{where} is of type {other!r}; messages, reasoning, function calls and "
            raise bad_request(f"{text}their outputs are read here.", where)


def _add_message(messages: list[Message], item: Body, where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(
            f"{where}.role is {role!r}; it is one of {', '.join(ROLES)}.", f"{where}.role"
        )
    content = read_text(item.get("content"), PARTS, f"{where}.content")
    if role == "assistant":
        turn = _turn(messages)
        if turn["content"] or turn.get("tool_calls"):
            turn = _turn(messages, begins=True)
        turn["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _turn(messages: list[Message], *, begins: bool = False) -> Message:
    """Return the assistant's message that is being put together, or a new one."""
    if begins or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _read_reasoning(item: Body, where: str) -> str:
    return read_text(
        read_list(item, "content", f"{where}."), ("reasoning_text",), f"{where}.content"
    )


def _read_call(item: Body, where: str) -> ToolCall:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise bad_request(f"{where} has no name and arguments.", where)
    return create_tool_call(name, arguments, item.get("call_id"))


def _read_tool(tool: object, where: str) -> Tool:
    """Read a tool into the form of chat completions, in which models are trained."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        named = tool.get("type") if isinstance(tool, dict) else json_type(tool)
        text = f"{where} is of type {named!r}; only functions, which the client runs, are known"
        raise bad_request(f"{text} here.", where)
    if not isinstance(tool.get("name"), str):
        raise bad_request(f"{where} has no name.", where)
    kept = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in kept if tool.get(name) is not None}
    return {"type": "function", "function": cast(ToolFunction, function)}


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _envelope(completion: Completion, status: str) -> JsonObject:
    fields = completion.request.fields
    said = {name: fields[name] for name in ECHOED if fields.get(name) is not None}
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        **ECHOED,
        **said,
        "id": completion.response_id,
        "object": "response",
        "created_at": int(completion.ended.timestamp()),
        "model": completion.request.model,
        "status": status,
        "error": None,
        "incomplete_details": incomplete,
        "previous_response_id": None,
        "store": False,
    }


def _write_answer(completion: Completion, output: list[Item]) -> JsonObject:
    return {
        **_envelope(completion, _status(completion)),
        "output": output,
        "usage": _usage(completion),
        **write_tokens(completion),
    }


def _output(completion: Completion, chat: Chat) -> list[Item]:
    """Write the items of the answer: reasoning, text and tool calls."""
    message, items = completion.message, list[Item]()
    if reasoning := message.get("reasoning_content"):
        content: list[Part] = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    if message["content"]:
        text = _text(completion, chat)
        items.append({"type": "message", "role": "assistant", "content": [text]})
    for call in message.get("tool_calls", ()):
        items.append({"type": "function_call", "call_id": call.get("id"), **call["function"]})
    name, status = completion.place.name, _status(completion)
    return [
        {"id": name(f"item {i}"), "type": item["type"], "status": status, **item}
        for i, item in enumerate(items)
    ]


def _text(completion: Completion, chat: Chat) -> Part:
    """Write the text; log-probabilities, if asked for, are those of all sampled tokens."""
    asked = LOGPROBS in read_list(completion.request.fields, "include")
    return {
        "type": "output_text",
        "text": completion.message["content"],
        "annotations": [],
        "logprobs": write_logprobs(completion, chat) if asked else [],
    }


def _usage(completion: Completion) -> JsonObject:
    prompt, sampled = completion.token_counts
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _pieces(completion: Completion, chat: Chat) -> Iterator[JsonObject]:
    """Yield the pieces of a stream.

    Each item is one piece, since an answer leaves only when all of it is recorded.
    """
    begun = {**_envelope(completion, "in_progress"), "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    output = _output(completion, chat)
    for index, item in enumerate(output):
        at = {"output_index": index, "item_id": item.get("id")}
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(item)}
        yield from _call_pieces(item, at) if "arguments" in item else _part_pieces(item, at)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    whole = _write_answer(completion, output)
    yield {"type": f"response.{_status(completion)}", "response": whole}


def _begun(item: Item) -> JsonObject:
    empty = {"arguments": ""} if "arguments" in item else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _call_pieces(item: Item, at: JsonObject) -> Iterator[JsonObject]:
    kinds, arguments = "response.function_call_arguments", item.get("arguments")
    yield {"type": f"{kinds}.delta", **at, "delta": arguments}
    yield {"type": f"{kinds}.done", **at, "name": item.get("name"), "arguments": arguments}


def _part_pieces(item: Item, at: JsonObject) -> Iterator[JsonObject]:
    (part,) = item.get("content", [])
    kinds, at = f"response.{part['type']}", {**at, "content_index": 0}
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield {"type": "response.content_part.added", **at, "part": empty}
    yield {"type": f"{kinds}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kinds}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}
