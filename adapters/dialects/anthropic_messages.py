"""Anthropic's messages: bodies read as requests, completions written as answers or streams."""

import json
import re
from collections.abc import Collection, Iterator, Sequence

from ratchet.adapters.calls import (
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
from ratchet.adapters.dialects import fields
from ratchet.adapters.dialects.fields import Api, Fields
from ratchet.adapters.rendering.chat import Chat, stop_string
from ratchet.adapters.rendering.messages import create_tool_call, read_tool

MODE_OF_CHOICE = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
DATE = re.compile(r"_\d{8}$")
"""End of a type of tools, which dates it."""
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    503: "overloaded_error",
}


def read(body: object, passed: Collection[str] = ()) -> Request:
    """Read a body; `passed` are fields that the model takes although no policy does."""
    sent, model = fields.check_body(body)
    sent.check_ranges({"temperature": (0, 2), "top_p": (0, 1)})
    sent.check_top_k()
    streams, asks_token_ids = sent.read("stream", bool), sent.read(fields.RETURN_TOKEN_IDS, bool)
    if streams and asks_token_ids:
        raise fields.bad_field(
            fields.RETURN_TOKEN_IDS, "is set in a stream; ask for token ids without stream."
        )
    tools, left_out = _read_tools(sent)
    request = Request(
        model=model,
        messages=[*_read_system(sent), *_read_messages(sent)],
        tools=tools,
        max_tokens=sent.read_count("max_tokens"),
        stop=sent.read_stops("stop_sequences"),
        fields=sent.without("messages", "system", "tools", "model"),
        format=_read_format(sent),
        choice=_read_choice(sent, tools),
        thinking=fields.read_thinking(sent)
        or fields.no_thinking(
            sent.read_object("thinking").get("type") == "disabled", "thinking.type"
        ),
        left_out=left_out,
        hints=fields.find_hints(sent, Api.MESSAGES, passed),
        dialect="messages",
    )
    fields.check_fields(sent, Api.MESSAGES, passed)
    return request


def answer(completion: Completion, chat: Chat) -> JsonObject:
    return {
        **_opening(completion),
        "content": _blocks(completion.message),
        **_ending(completion, chat),
        "usage": _usage(completion),
        **fields.write_token_ids(completion),
    }


def stream(completion: Completion, chat: Chat, **_: object) -> Iterator[str]:
    yield from map(fields.write_named, _pieces(completion, chat))


def wait(*_: object) -> str:
    """Write a ping, which clients leave out of what they read."""
    return fields.write_named({"type": "ping"})


def write_late_error(refused: Refused, *_: object) -> str:
    return fields.write_named(write_error(refused))


def write_error(refused: Refused) -> JsonObject:
    shown = {"type": ERROR_TYPES.get(refused.status, "api_error"), "message": refused.message}
    return {"type": "error", "error": shown, "request_id": None}


def _read_system(sent: Fields) -> list[Message]:
    system = sent.get("system")
    if system in (None, "", []):
        return []
    return [{"role": "system", "content": fields.read_text(system, "system")}]


def _read_messages(sent: Fields) -> list[Message]:
    messages = sent.read_some("messages")
    read = [one for message, path in messages for one in _read_message(Fields(message, path))]
    if read[-1]["role"] == "assistant":
        text = "The last message is the assistant's, and an answer cannot be continued here; "
        raise fields.bad_request(f"{text}end with a user's message.", messages[-1][1])
    return read


def _read_message(sent: Fields) -> list[Message]:
    """Read a message into messages of chat completions, where each tool's result is one."""
    role, content = sent.get("role"), sent.get("content")
    if not isinstance(role, str) or role not in ("user", "assistant", "system"):
        raise fields.bad_field(sent.path_of("role"), f"is {role!r}; it is user or assistant.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [
        fields.check_object(block, path, "a block") for block, path in sent.read_list("content")
    ]
    if not blocks:
        raise fields.bad_field(sent.path_of("content"), "is empty; send at least one block.")
    return [_read_assistant(blocks)] if role == "assistant" else _read_user(role, blocks)


def _read_assistant(blocks: Sequence[Fields]) -> Message:
    """Read the assistant's blocks into one message."""
    said: Message = {"role": "assistant", "content": ""}
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                said.setdefault("tool_calls", []).append(_read_call(block))
            case "thinking" if isinstance(thinking := block.get("thinking"), str):
                said["reasoning_content"] = said.get("reasoning_content", "") + thinking
            case "redacted_thinking":
                pass
            case _:
                said["content"] += fields.read_text([block], block.path)
    return said


def _read_user(role: str, blocks: Sequence[Fields]) -> list[Message]:
    """Read a user's blocks: each result is one message, and so is the text between results."""
    heard: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            sent = block.get("content")
            content = "" if sent is None else fields.read_text(sent, block.path_of("content"))
            name = block.read("tool_use_id", str) or ""
            heard.append({"role": "tool", "content": content, "tool_call_id": name})
        elif heard and heard[-1]["role"] == role:
            heard[-1]["content"] += fields.read_text([block], block.path)
        else:
            heard.append({"role": role, "content": fields.read_text([block], block.path)})
    return heard


def _read_call(block: Fields) -> ToolCall:
    name = block.read("name", str)
    if not name:
        raise fields.bad_field(block.path, "has no name of a tool.")
    arguments = json.dumps(block.read_object("input"), ensure_ascii=False)
    return create_tool_call(name, arguments, block.get("id"))


def _read_tools(sent: Fields) -> tuple[list[Tool], list[str]]:
    """Read the tools: those that the client runs, and the types of the others."""
    tools, left_out = list[Tool](), list[str]()
    for tool, path in sent.read_list("tools"):
        read, kind = _read_tool(tool, path), fields.type_of(tool)
        if read is None:
            left_out.append(str(kind))
        else:
            tools.append(read)
    fields.check_some_left(tools, left_out)
    return tools, left_out


def _read_tool(tool: object, path: str) -> Tool | None:
    """Read a tool into the form of chat completions, in which models are trained.

    None if the client does not run it.
    """
    sent = Fields(tool, path)
    name, kind = sent.get("name"), sent.get("type")
    if kind not in (None, "custom"):
        undated = DATE.sub("", kind) if isinstance(kind, str) else kind
        defined = fields.find_function(Api.MESSAGES, undated, path)
        if defined is None:
            return None
        function = {**defined, "name": name if isinstance(name, str) else defined["name"]}
        return read_tool({"type": "function", "function": function}, path)
    if not isinstance(name, str):
        raise fields.bad_field(path, "is not an object with a name and an input_schema.")
    function: ToolFunction = {"name": name}
    if description := sent.read("description", str):
        function["description"] = description
    function["parameters"] = dict(sent.read_object("input_schema"))
    return read_tool({"type": "function", "function": function}, path)


def _read_choice(sent: Fields, tools: Sequence[Tool]) -> Choice:
    chosen = sent.read_object("tool_choice")
    mode = chosen.get("type", "auto")
    if not isinstance(mode, str) or mode not in MODE_OF_CHOICE:
        text = f"tool_choice.type is {mode!r}; it is one of {', '.join(MODE_OF_CHOICE)}."
        raise fields.bad_request(text, "tool_choice")
    name = chosen.read("name", str)
    if mode == "tool" and not name:
        raise fields.bad_field("tool_choice", "names no tool; give its name.")
    names = (name,) if mode == "tool" and name else ()
    fields.check_offered(MODE_OF_CHOICE[mode], names, tools)
    single = chosen.read("disable_parallel_tool_use", bool)
    return Choice(MODE_OF_CHOICE[mode], names, parallel=not single)


def _read_format(sent: Fields) -> Format | None:
    """Read the format of the answer from its current field, or from the earlier beta's field."""
    today = _read_schema(sent.read_object("output_config").get("format"), "output_config.format")
    before = _read_schema(sent.get("output_format"), "output_format")
    return today or before


def _read_schema(value: object, path: str) -> Format | None:
    if value is None:
        return None
    sent, named = Fields(value, path), fields.type_of(value)
    if named != "json_schema":
        raise fields.bad_request(f"{path}.type is {named!r}; it must be json_schema.", path)
    return Format(sent.read("schema", dict), sent.path_of("schema"))


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
    """Yield a stream of blocks, token by token; an answer leaves when all of it is recorded."""
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(completion)
    start = {**_opening(completion), **nothing, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(completion.message)):
        empty, kind, field, written = _split(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for piece in chat.pieces(written):
            delta = {"type": kind, field: piece}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _ending(completion, chat), "usage": usage}
    yield {"type": "message_stop"}


def _split(block: JsonObject) -> tuple[JsonObject, str, str, str]:
    """Split a block into the empty block that begins it in a stream, and its content.

    The content has a type of deltas, their field, and the text that they share.
    """
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, "input_json_delta", "partial_json", written
    name = str(block["type"])
    return {**block, name: ""}, f"{name}_delta", name, str(block[name])


def _usage(completion: Completion) -> dict[str, int]:
    prompt, sampled = completion.token_counts
    return {"input_tokens": prompt, "output_tokens": sampled}
