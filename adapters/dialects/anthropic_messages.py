"""Anthropic's messages: bodies read as requests, completions written as answers or streams."""

import json
from collections.abc import Iterator, Sequence

from adapters.calls import (
    Choice,
    Completion,
    Format,
    JsonObject,
    Message,
    Refused,
    Request,
    Tool,
    ToolCall,
    ToolFunction,
)
from adapters.dialects.fields import (
    TOKENS,
    Body,
    bad_request,
    check_body,
    check_ranges,
    create_tool_call,
    json_type,
    read_count,
    read_field,
    read_list,
    read_object,
    read_stops,
    read_text,
    wants_tokens,
    write_tokens,
)
from adapters.dialects.openai_fields import check_offered
from adapters.dialects.sse import write_named
from adapters.rendering.chat import Chat, stop_string

MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    503: "overloaded_error",
}


def read(body: object) -> Request:
    """Read the request in a parsed body; a field that cannot be honoured is refused."""
    sent, model = check_body(body)
    check_ranges(sent, {"temperature": (0, 2), "top_p": (0, 1)})
    read_field(sent, "stream", bool, "a boolean")
    if wants_tokens(sent) and sent.get("stream"):
        raise bad_request(f"{TOKENS} is set in a stream; ask for token ids without stream.", TOKENS)
    tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(read_list(sent, "tools"))]
    return Request(
        model=model,
        messages=[*_read_system(sent), *_read_messages(sent)],
        tools=tools,
        max_tokens=read_count(sent, "max_tokens"),
        stop=read_stops(sent, "stop_sequences"),
        fields={k: v for k, v in sent.items() if k not in ("messages", "system", "tools", "model")},
        format=_read_format(sent),
        choice=_read_choice(sent, tools),
    )


def answer(completion: Completion, chat: Chat) -> JsonObject:
    """Write the body of the answer, with the token ids if they were asked for."""
    return {
        **_opening(completion),
        "content": _blocks(completion.message),
        **_ending(completion, chat),
        "usage": _usage(completion),
        **write_tokens(completion),
    }


def stream(completion: Completion, chat: Chat) -> Iterator[str]:
    """Yield the lines of the answer's stream."""
    yield from map(write_named, _pieces(completion, chat))


def write_error(refused: Refused) -> JsonObject:
    """Write the body of a refusal."""
    shown = {"type": KINDS.get(refused.status, "api_error"), "message": refused.message}
    return {"type": "error", "error": shown, "request_id": None}


def _read_system(body: Body) -> list[Message]:
    if body.get("system") in (None, "", []):
        return []
    return [{"role": "system", "content": read_text(body["system"], ("text",), "system")}]


def _read_messages(body: Body) -> list[Message]:
    sent = read_list(body, "messages")
    if not sent:
        raise bad_request("There are no messages; send at least one.", "messages")
    read = [
        one for i, message in enumerate(sent) for one in _read_message(message, f"messages[{i}]")
    ]
    if read and read[-1]["role"] == "assistant":
        text = "The last message is the assistant's, and an answer cannot be continued here; "
        raise bad_request(f"{text}end with a user's message.", f"messages[{len(sent) - 1}]")
    return read


def _read_message(message: object, where: str) -> list[Message]:
    """Read a message into those of chat completions, where a tool's result is its own message."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role is {role!r}; it is user or assistant.", f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _read_blocks(message, where)
    return [_read_assistant(blocks)] if role == "assistant" else _read_user(role, blocks)


def _read_blocks(message: Body, where: str) -> list[tuple[Body, str]]:
    """Read a message's blocks, each with its place in the body."""
    blocks: list[tuple[Body, str]] = []
    for index, block in enumerate(read_list(message, "content", f"{where}.")):
        place = f"{where}.content[{index}]"
        if not isinstance(block, dict):
            raise bad_request(f"{place} is {json_type(block)}; a block is an object.", place)
        blocks.append((block, place))
    if not blocks:
        raise bad_request(f"{where}.content is empty; send at least one block.", f"{where}.content")
    return blocks


def _read_assistant(blocks: Sequence[tuple[Body, str]]) -> Message:
    """Read the assistant's blocks into one message."""
    said: Message = {"role": "assistant", "content": ""}
    for block, place in blocks:
        match block.get("type"):
            case "tool_use":
                said.setdefault("tool_calls", []).append(_read_call(block, place))
            case "thinking" if isinstance(thinking := block.get("thinking"), str):
                said["reasoning_content"] = said.get("reasoning_content", "") + thinking
            case "redacted_thinking":
                pass
            case _:
                said["content"] += read_text([block], ("text",), place)
    return said


def _read_user(role: str, blocks: Sequence[tuple[Body, str]]) -> list[Message]:
    """Read a user's blocks: each result is one message, and so is the text between results."""
    heard: list[Message] = []
    for block, place in blocks:
        if block.get("type") == "tool_result":
            sent = block.get("content")
            content = "" if sent is None else read_text(sent, ("text",), f"{place}.content")
            name = read_field(block, "tool_use_id", str, "a string", f"{place}.") or ""
            heard.append({"role": "tool", "content": content, "tool_call_id": name})
        elif heard and heard[-1]["role"] == role:
            heard[-1]["content"] += read_text([block], ("text",), place)
        else:
            heard.append({"role": role, "content": read_text([block], ("text",), place)})
    return heard


def _read_call(block: Body, where: str) -> ToolCall:
    name = read_field(block, "name", str, "a string", f"{where}.")
    if not name:
        raise bad_request(f"{where} has no name of a tool.", where)
    arguments = json.dumps(read_object(block, "input", f"{where}."), ensure_ascii=False)
    return create_tool_call(name, arguments, block.get("id"))


def _read_tool(tool: object, where: str) -> Tool:
    """Read a tool into the form of chat completions, in which models are trained."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise bad_request(f"{where} is not an object with a name and an input_schema.", where)
    if tool.get("type") not in (None, "custom"):
        text = f"{where} is of type {tool['type']!r}, which only Anthropic runs; "
        raise bad_request(f"{text}send a tool with an input_schema and run it yourself.", where)
    function: ToolFunction = {"name": tool["name"]}
    if description := read_field(tool, "description", str, "a string", f"{where}."):
        function["description"] = description
    function["parameters"] = read_object(tool, "input_schema", f"{where}.")
    return {"type": "function", "function": function}


def _read_choice(body: Body, tools: Sequence[Tool]) -> Choice:
    chosen = read_object(body, "tool_choice")
    mode = chosen.get("type", "auto")
    if not isinstance(mode, str) or mode not in MODES:
        text = f"tool_choice.type is {mode!r}; it is one of {', '.join(MODES)}."
        raise bad_request(text, "tool_choice")
    name = read_field(chosen, "name", str, "a string", "tool_choice.")
    if mode == "tool" and not name:
        raise bad_request("tool_choice names no tool; give its name.", "tool_choice")
    names = (name,) if mode == "tool" and name else ()
    check_offered(MODES[mode], names, tools)
    single = read_field(chosen, "disable_parallel_tool_use", bool, "a boolean", "tool_choice.")
    return Choice(MODES[mode], names, parallel=not single)


def _read_format(body: Body) -> Format | None:
    """Read the format of the answer from its current field, or from that of the earlier beta."""
    today = _read_schema(read_object(body, "output_config").get("format"), "output_config.format")
    before = _read_schema(body.get("output_format"), "output_format")
    return today or before


def _read_schema(value: object, where: str) -> Format | None:
    if value is None:
        return None
    named = value.get("type") if isinstance(value, dict) else json_type(value)
    if not isinstance(value, dict) or named != "json_schema":
        raise bad_request(f"{where}.type is {named!r}; it must be json_schema.", where)
    schema = read_field(value, "schema", dict, "an object", f"{where}.")
    return Format(schema, f"{where}.schema")


def _opening(completion: Completion) -> JsonObject:
    return {
        "id": completion.response_id,
        "type": "message",
        "role": "assistant",
        "model": completion.request.model,
    }


def _ending(completion: Completion, chat: Chat) -> JsonObject:
    stop = stop_string(completion, chat)
    reason = STOP_REASONS.get(completion.finish_reason, "end_turn")
    reason = reason if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _blocks(message: Message) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], _parse(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": name, "input": arguments})
    return blocks


def _parse(arguments: str | JsonObject) -> object:
    """Parse a call's arguments. A policy's are always JSON; another role's may be any text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        text = f"The answer calls a tool with arguments that are not JSON ({error})."
        raise Refused(500, text, code="malformed_answer") from error


def _pieces(completion: Completion, chat: Chat) -> Iterator[JsonObject]:
    """Yield the pieces of a stream.

    Each block is one piece, since an answer leaves only when all of it is recorded.
    """
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(completion)
    start = {**_opening(completion), **nothing, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(completion.message)):
        empty, delta = _split(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _ending(completion, chat), "usage": usage}
    yield {"type": "message_stop"}


def _split(block: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Split a block into the empty one that begins it in a stream, and its content."""
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
    name = str(block["type"])
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}


def _usage(completion: Completion) -> dict[str, int]:
    prompt, sampled = completion.token_counts
    return {"input_tokens": prompt, "output_tokens": sampled}
