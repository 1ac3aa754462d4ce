"""OpenAI's responses: bodies read as requests, completions written as answers or streams."""

from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from itertools import islice

from ratchet.adapters.calls import Completion, JsonObject, Message, Refused, Request
from ratchet.adapters.dialects.field_rules import Api, check_fields, find_hints
from ratchet.adapters.dialects.fields import (
    RETURN_TOKEN_IDS,
    Fields,
    bad_field,
    bad_request,
    check_body,
    check_object,
    read_text,
    read_thinking,
    write_named,
    write_token_ids,
)
from ratchet.adapters.dialects.openai_fields import (
    check_sampling,
    read_choice,
    read_effort,
    read_format,
    write_error,
    write_logprobs,
)
from ratchet.adapters.dialects.openai_tools import (
    CALLS,
    OUTPUTS,
    PARTS,
    name_chosen,
    read_call,
    read_output,
    read_tools,
    tools_named,
    write_call,
)
from ratchet.adapters.rendering.chat import Chat

__all__ = ["answer", "read", "stream", "wait", "write_error", "write_late_error"]

RESPONSE_ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"
BEGINNING = "response.created", "response.in_progress"
"""Events with which a stream begins."""
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


def read(body: object, passed: Collection[str] = ()) -> Request:
    """Read a body; `passed` are fields that the model takes although no policy does."""
    sent, model = check_body(body)
    _check_fields(sent)
    tools = read_tools(sent)
    request = Request(
        model=model,
        messages=[*_read_instructions(sent), *_read_messages(sent)],
        tools=tools.functions,
        max_tokens=sent.read_count("max_output_tokens"),
        stop=[],
        fields=sent.without("input", "model"),
        format=read_format(sent.read_object("text").get("format"), "text.format"),
        choice=read_choice(sent, tools.functions, name_chosen),
        thinking=read_thinking(sent) or read_effort(sent.read_object("reasoning"), "effort"),
        left_out=tools.left_out,
        hints=find_hints(sent, Api.RESPONSES, passed),
        dialect="responses",
    )
    check_fields(sent, Api.RESPONSES, passed)
    return request


def answer(completion: Completion, chat: Chat) -> JsonObject:
    return _write_answer(completion, _output(completion, chat))


def stream(completion: Completion, chat: Chat, waited: int = 0) -> Iterator[str]:
    """Yield the lines of the answer's stream, whose pieces are numbered.

    A client that has waited has read the first ones.
    """
    pieces = islice(_pieces(completion, chat), len(BEGINNING) if waited else 0, None)
    yield from (_write(piece, at) for at, piece in enumerate(pieces, _number(waited)))


def wait(request: Request, name: str, told: int) -> str:
    """Write how the stream begins, and then events without content, as OpenAI's service does.

    Codex counts no comments, and other clients know no event before the first one.
    """
    if told:
        return _write({"type": "keepalive"}, _number(told))
    begun = _begin(request, name, datetime.now(UTC))
    return "".join(_write(piece, at) for at, piece in enumerate(begun))


def write_late_error(refused: Refused, request: Request, name: str, waited: int) -> str:
    kind = "invalid_prompt" if refused.status < 500 else "server_error"
    failed = {
        **_envelope(request, name, datetime.now(UTC), "failed"),
        "error": {"code": kind, "message": refused.message},
        "output": [],
        "usage": None,
    }
    return _write({"type": "response.failed", "response": failed}, _number(waited))


def _number(told: int) -> int:
    """Return the number of the next piece, for a client that was told so often to wait."""
    return len(BEGINNING) + told - 1 if told else 0


def _write(piece: JsonObject, number: int) -> str:
    return write_named({**piece, "sequence_number": number})


def _check_fields(sent: Fields) -> None:
    check_sampling(sent)
    sent.read(RETURN_TOKEN_IDS, bool)
    sent.read("include", list)
    sent.read("store", bool)


def _read_instructions(sent: Fields) -> list[Message]:
    text = sent.read("instructions", str)
    return [{"role": "system", "content": text}] if text else []


def _read_messages(sent: Fields) -> list[Message]:
    text = sent.get("input")
    if isinstance(text, str):
        return [{"role": "user", "content": text}]
    items = sent.read_list("input")
    if not items:
        raise bad_request("There is no input; send a text or an array of items.", "input")
    messages: list[Message] = []
    for item, path in items:
        _add(messages, check_object(item, path, "an item"))
    return messages


def _add(messages: list[Message], item: Fields) -> None:
    """Add an item as a message or to the last one: an assistant's turn is one message."""
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item)
        case "reasoning":
            sent = item.read("content", list) or []
            thought = read_text(sent, item.path_of("content"), ("reasoning_text",))
            _turn(messages, begins=True)["reasoning_content"] = thought
        case kind if kind in CALLS:
            _turn(messages).setdefault("tool_calls", []).append(read_call(item))
        case kind if kind in OUTPUTS:
            content, name = read_output(item)
            messages.append({"role": "tool", "content": content, "tool_call_id": name})
        case other:
            problem = f"is of type {other!r}; messages, reasoning, calls of tools and their outputs"
            raise bad_field(item.path, f"{problem} are read here.")


def _add_message(messages: list[Message], item: Fields) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in RESPONSE_ROLES:
        raise bad_field(
            item.path_of("role"), f"is {role!r}; it is one of {', '.join(RESPONSE_ROLES)}."
        )
    content = read_text(item.get("content"), item.path_of("content"), PARTS)
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


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _envelope(request: Request, name: str, created: datetime, status: str) -> JsonObject:
    fields = request.fields
    said = {name: fields[name] for name in ECHOED if fields.get(name) is not None}
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        **ECHOED,
        **said,
        "id": name,
        "object": "response",
        "created_at": int(created.timestamp()),
        "model": request.model,
        "status": status,
        "error": None,
        "incomplete_details": incomplete,
        "previous_response_id": None,
        "store": False,
    }


def _of(completion: Completion) -> tuple[Request, str, datetime]:
    return completion.request, completion.response_id, completion.ended


def _begin(request: Request, name: str, created: datetime) -> Iterator[JsonObject]:
    begun = {**_envelope(request, name, created, "in_progress"), "output": [], "usage": None}
    for kind in BEGINNING:
        yield {"type": kind, "response": begun}


def _write_answer(completion: Completion, output: list[JsonObject]) -> JsonObject:
    return {
        **_envelope(*_of(completion), _status(completion)),
        "output": output,
        "usage": _usage(completion),
        **write_token_ids(completion),
    }


def _output(completion: Completion, chat: Chat) -> list[JsonObject]:
    """Write the items of the answer: reasoning, text and tool calls."""
    message, items = completion.message, list[JsonObject]()
    if reasoning := message.get("reasoning_content"):
        content: list[JsonObject] = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    if message["content"]:
        text = _text(completion, chat)
        items.append({"type": "message", "role": "assistant", "content": [text]})
    if calls := message.get("tool_calls", ()):
        named = tools_named(completion.request)
        items += [write_call(call, named) for call in calls]
    name, status = completion.id.name, _status(completion)
    return [
        {"id": name(f"item {i}"), "type": item["type"], "status": status, **item}
        for i, item in enumerate(items)
    ]


def _text(completion: Completion, chat: Chat) -> JsonObject:
    """Write the text; log-probabilities, if asked for, cover all sampled tokens."""
    asked = LOGPROBS in (Fields({**completion.request.fields}).read("include", list) or ())
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
    """Yield a stream of items, token by token; an answer leaves when all of it is recorded."""
    yield from _begin(*_of(completion))
    output = _output(completion, chat)
    for index, item in enumerate(output):
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(item)}
        yield from _content_pieces(item, {"output_index": index, "item_id": item["id"]}, chat)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    whole = _write_answer(completion, output)
    yield {"type": f"response.{_status(completion)}", "response": whole}


def _begun(item: JsonObject) -> JsonObject:
    empty: JsonObject = {"arguments": "", "input": "", "content": []}
    begun = {name: empty.get(name, value) for name, value in item.items()}
    return {**begun, "status": "in_progress"}


def _content_pieces(item: JsonObject, at: JsonObject, chat: Chat) -> Iterator[JsonObject]:
    match item:
        case {"content": [dict(part)]}:
            kind, at = f"response.{part['type']}", {**at, "content_index": 0}
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            none: JsonObject = {"logprobs": []} if logprobs else {}
            empty = {**part, "text": "", **none}
            yield {"type": "response.content_part.added", **at, "part": empty}
            *before, last = chat.pieces(part["text"]) or [""]
            for piece in before:
                yield {"type": f"{kind}.delta", **at, "delta": piece, **none}
            yield {"type": f"{kind}.delta", **at, "delta": last, **logprobs}
            yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **at, "part": part}
        case {"name": name, "arguments": arguments}:
            kind = "response.function_call_arguments"
            for piece in chat.pieces(str(arguments)):
                yield {"type": f"{kind}.delta", **at, "delta": piece}
            yield {"type": f"{kind}.done", **at, "name": name, "arguments": arguments}
        case {"input": text}:
            kind = "response.custom_tool_call_input"
            for piece in chat.pieces(str(text)):
                yield {"type": f"{kind}.delta", **at, "delta": piece}
            yield {"type": f"{kind}.done", **at, "input": text}
        case _:
            pass  # the item of another tool is told whole
