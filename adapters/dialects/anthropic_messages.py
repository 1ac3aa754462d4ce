"""Anthropic's messages: a body → a request, a completion → an answer or its stream."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from adapters.calls import Choice, Completion, Format, Message, Refused, Request
from adapters.chat import Chat, stop_string
from adapters.dialects.fields import (
    Body,
    at_least_one,
    bad,
    body_of,
    check_ranges,
    kind,
    listed,
    object_of,
    stops,
    text_of,
    typed,
)
from adapters.dialects.openai_fields import check_offered
from adapters.dialects.sse import named
from adapters.dialects.structured import format_of

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
    """The request in a parsed body. What cannot be honoured and would mislead is refused."""
    sent = body_of(body)
    check_ranges(sent, {"temperature": (0, 2), "top_p": (0, 1)})
    typed(sent, "stream", bool, "a boolean")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed(sent, "tools"))]
    return Request(
        model=sent["model"],
        messages=[*_system(sent), *_messages(sent)],
        tools=tools,
        max_tokens=at_least_one(sent, "max_tokens"),
        stop=stops(sent, "stop_sequences"),
        fields={k: v for k, v in sent.items() if k not in ("messages", "system", "tools", "model")},
        format=_format(sent),
        choice=_choice(sent, tools),
    )


def answer(completion: Completion, chat: Chat) -> dict[str, Any]:
    """The body of the answer, with the token ids where vLLM puts them in OpenAI's."""
    return {
        **_opening(completion),
        "content": _blocks(completion.message),
        **_ending(completion, chat),
        "usage": _usage(completion),
        "prompt_token_ids": list(completion.prompt_tokens),
        "token_ids": list(completion.sampled_tokens),
    }


def lines(completion: Completion, chat: Chat) -> Iterator[str]:
    """The same answer as it is streamed."""
    yield from map(named, _pieces(completion, chat))


def error(refused: Refused) -> dict[str, Any]:
    """The body of a refusal."""
    shown = {"type": KINDS.get(refused.status, "api_error"), "message": refused.message}
    return {"type": "error", "error": shown, "request_id": None}


def _system(body: Body) -> list[Message]:
    if body.get("system") in (None, "", []):
        return []
    return [{"role": "system", "content": text_of(body["system"], ("text",), "system")}]


def _messages(body: Body) -> list[Message]:
    sent = listed(body, "messages")
    if not sent:
        raise bad("There are no messages; send at least one.", "messages")
    read = [one for i, message in enumerate(sent) for one in _message(message, f"messages[{i}]")]
    if read and read[-1]["role"] == "assistant":
        text = "The last message is the assistant's; an answer that is begun cannot be gone on "
        raise bad(f"{text}with here, so end with a user's message.", f"messages[{len(sent) - 1}]")
    return read


def _message(message: Any, where: str) -> list[Message]:
    """One message as chat completions would have it: results of tools are messages there."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}.role is {role!r}; it is user or assistant.", f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = listed(message, "content", f"{where}.")
    if not blocks:
        raise bad(f"{where}.content is empty; send at least one block.", f"{where}.content")
    places = [f"{where}.content[{i}]" for i in range(len(blocks))]
    for block, place in zip(blocks, places, strict=True):
        if not isinstance(block, dict):
            raise bad(f"{place} is {kind(block)}; a block is an object.", place)
    if role == "assistant":
        return [_said(blocks, places)]
    return _heard(role, blocks, places)


def _said(blocks: Sequence[Body], places: Sequence[str]) -> Message:
    """The assistant's message of its blocks."""
    said: Message = {"role": "assistant", "content": ""}
    for block, place in zip(blocks, places, strict=True):
        match block.get("type"):
            case "tool_use":
                said.setdefault("tool_calls", []).append(_call(block, place))
            case "thinking" if isinstance(block.get("thinking"), str):
                said["reasoning_content"] = said.get("reasoning_content", "") + block["thinking"]
            case "redacted_thinking":
                pass
            case _:
                said["content"] += text_of([block], ("text",), place)
    return said


def _heard(role: str, blocks: Sequence[Body], places: Sequence[str]) -> list[Message]:
    """A user's blocks: each result a message of its own, and the text between them."""
    heard: list[Message] = []
    for block, place in zip(blocks, places, strict=True):
        if block.get("type") == "tool_result":
            sent = block.get("content")
            content = "" if sent is None else text_of(sent, ("text",), f"{place}.content")
            name = typed(block, "tool_use_id", str, "a string", f"{place}.") or ""
            heard.append({"role": "tool", "content": content, "tool_call_id": name})
        elif heard and heard[-1]["role"] == role:
            heard[-1]["content"] += text_of([block], ("text",), place)
        else:
            heard.append({"role": role, "content": text_of([block], ("text",), place)})
    return heard


def _call(block: Body, where: str) -> dict[str, Any]:
    name = typed(block, "name", str, "a string", f"{where}.")
    if not name:
        raise bad(f"{where} has no name of a tool.", where)
    arguments = json.dumps(object_of(block, "input", f"{where}."), ensure_ascii=False)
    written = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": block["id"], **written} if isinstance(block.get("id"), str) else written


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as chat completions has it, which is how the models were taught."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise bad(f"{where} is not an object with a name and an input_schema.", where)
    if tool.get("type") not in (None, "custom"):
        text = f"{where} is of the type {tool['type']!r}, which only Anthropic runs; "
        raise bad(f"{text}send a tool with an input_schema and run it yourself.", where)
    function = {"name": tool["name"]}
    if typed(tool, "description", str, "a string", f"{where}."):
        function["description"] = tool["description"]
    function["parameters"] = object_of(tool, "input_schema", f"{where}.")
    return {"type": "function", "function": function}


def _choice(body: Body, tools: Sequence[dict[str, Any]]) -> Choice:
    chosen = object_of(body, "tool_choice")
    mode = chosen.get("type", "auto")
    if not isinstance(mode, str) or mode not in MODES:
        text = f"tool_choice.type is {mode!r}; it is one of {', '.join(MODES)}."
        raise bad(text, "tool_choice")
    name = typed(chosen, "name", str, "a string", "tool_choice.")
    if mode == "tool" and not name:
        raise bad("tool_choice names no tool; give its name.", "tool_choice")
    names = (name,) if mode == "tool" else ()
    check_offered(MODES[mode], names, tools)
    single = typed(chosen, "disable_parallel_tool_use", bool, "a boolean", "tool_choice.")
    return Choice(MODES[mode], names, parallel=not single)


def _format(body: Body) -> Format | None:
    """The form of the answer, by its field of today or else of the beta before it."""
    today = _form(object_of(body, "output_config").get("format"), "output_config.format")
    before = _form(body.get("output_format"), "output_format")
    return today or before


def _form(value: Any, where: str) -> Format | None:
    if value is None:
        return None
    named = value.get("type") if isinstance(value, dict) else kind(value)
    if named != "json_schema":
        raise bad(f"{where}.type is {named!r}; it must be json_schema.", where)
    schema = typed(value, "schema", dict, "an object", f"{where}.")
    return format_of(schema, f"{where}.schema")


def _opening(completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.response_id,
        "type": "message",
        "role": "assistant",
        "model": completion.request.model,
    }


def _ending(completion: Completion, chat: Chat) -> dict[str, Any]:
    stop = stop_string(completion, chat)
    reason = STOP_REASONS.get(completion.finish_reason, "end_turn")
    reason = reason if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks = []
    if message.get("reasoning_content"):
        thinking = message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], _value(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _value(arguments: Any) -> Any:
    """The policy's are always JSON; what answers another role may write anything."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        text = f"The answer calls a tool with arguments that are no JSON ({error})."
        raise Refused(500, text, code="malformed_answer") from error


def _pieces(completion: Completion, chat: Chat) -> Iterator[dict[str, Any]]:
    """The whole of each block is one piece, since an answer leaves when it is recorded."""
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(completion)
    start = {**_opening(completion), **nothing, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(completion.message)):
        empty, delta = _emptied(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _ending(completion, chat), "usage": usage}
    yield {"type": "message_stop"}


def _emptied(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The block as a stream begins it, and what then fills it."""
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
    name = block["type"]
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}


def _usage(completion: Completion) -> dict[str, int]:
    prompt, sampled = completion.counted
    return {"input_tokens": prompt, "output_tokens": sampled}
