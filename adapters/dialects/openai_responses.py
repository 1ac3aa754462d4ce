"""OpenAI's responses: bodies read as requests, completions written as answers or streams.

Their tools are shown as functions, the form in which models are trained. A custom tool, whose input
is a text, is a function with the argument `input`. A function of a namespace is shown as
`NAMESPACE__NAME`. A shell, and an editor by patches, is a function of its calls' items.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

from jsonschema_rs import is_valid

from ratchet.adapters.calls import Completion, JsonObject, Message, Refused, Request, Tool, ToolCall
from ratchet.adapters.dialects import fields
from ratchet.adapters.dialects.fields import Api, Fields
from ratchet.adapters.dialects.openai_chat import (
    check_sampling,
    read_choice,
    read_format,
    write_error,
    write_logprobs,
)
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.messages import create_tool_call, parse_text, read_tool

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
PLAIN, CUSTOM, NAMESPACE = "function", "custom", "namespace"
OF_FUNCTION = ("description", "parameters", "strict")
INPUT = "input"
OF_CALL, OUTPUT = "_call", "_call_output"
CONTENTS: Mapping[str, tuple[str, JsonObject]] = {
    "local_shell": ("action", {"type": "exec", "env": {}}),
    "shell": ("action", {}),
    "apply_patch": ("operation", {}),
}
"""By a tool's type, the field of a call's item with the arguments, and what is always in it."""
CALLS = ("function_call", "custom_tool_call", *(kind + OF_CALL for kind in CONTENTS))
OUTPUTS = tuple(f"{call}_output" for call in CALLS)
PARTS = ("input_text", "output_text", "text", "refusal")


def read(body: object, passed: Collection[str] = ()) -> Request:
    """Read a body; `passed` are fields that the model takes although no policy does."""
    sent, model = fields.check_body(body)
    check_sampling(sent)
    sent.read(fields.RETURN_TOKEN_IDS, bool)
    sent.read("include", list)
    sent.read("store", bool)
    tools = read_tools(sent)
    request = Request(
        model=model,
        messages=_read_messages(sent),
        tools=tools.functions,
        max_tokens=sent.read_count("max_output_tokens"),
        stop=[],
        fields=sent.without("input", "model"),
        format=read_format(sent.read_object("text").get("format"), "text.format"),
        choice=read_choice(sent, tools.functions, name_chosen),
        thinking=fields.read_thinking(sent)
        or fields.no_thinking(
            sent.read_object("reasoning").read("effort", str) == "none", "reasoning.effort"
        ),
        left_out=tools.left_out,
        hints=fields.find_hints(sent, Api.RESPONSES, passed),
        dialect="responses",
    )
    fields.check_fields(sent, Api.RESPONSES, passed)
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
    return fields.write_named({**piece, "sequence_number": number})


def _read_messages(sent: Fields) -> list[Message]:
    told, text = sent.read("instructions", str), sent.get("input")
    first: list[Message] = [{"role": "system", "content": told}] if told else []
    if isinstance(text, str):
        return [*first, {"role": "user", "content": text}]
    items = sent.read_list("input")
    if not items:
        raise fields.bad_request("There is no input; send a text or an array of items.", "input")
    messages: list[Message] = []
    for item, path in items:
        _add(messages, fields.check_object(item, path, "an item"))
    return first + messages


def _add(messages: list[Message], item: Fields) -> None:
    """Add an item as a message or to the last one: an assistant's turn is one message."""
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item)
        case "reasoning":
            sent = item.read("content", list) or []
            thought = fields.read_text(sent, item.path_of("content"), ("reasoning_text",))
            _turn(messages, begins=True)["reasoning_content"] = thought
        case kind if kind in CALLS:
            _turn(messages).setdefault("tool_calls", []).append(read_call(item))
        case kind if kind in OUTPUTS:
            content, name = read_output(item)
            messages.append({"role": "tool", "content": content, "tool_call_id": name})
        case other:
            problem = f"is of type {other!r}; messages, reasoning, calls of tools and their outputs"
            raise fields.bad_field(item.path, f"{problem} are read here.")


def _add_message(messages: list[Message], item: Fields) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in RESPONSE_ROLES:
        raise fields.bad_field(
            item.path_of("role"), f"is {role!r}; it is one of {', '.join(RESPONSE_ROLES)}."
        )
    content = fields.read_text(item.get("content"), item.path_of("content"), PARTS)
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


def _begin(request: Request, name: str, created: datetime) -> Iterator[JsonObject]:
    begun = {**_envelope(request, name, created, "in_progress"), "output": [], "usage": None}
    for kind in BEGINNING:
        yield {"type": kind, "response": begun}


def _write_answer(completion: Completion, output: list[JsonObject]) -> JsonObject:
    request, name, status = completion.request, completion.response_id, _status(completion)
    return {
        **_envelope(request, name, completion.ended, status),
        "output": output,
        "usage": _usage(completion),
        **fields.write_token_ids(completion),
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
        # The tools by the names that the model was shown.
        named = read_tools(Fields({"tools": completion.request.fields.get("tools")})).named
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
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _pieces(completion: Completion, chat: Chat) -> Iterator[JsonObject]:
    """Yield a stream of items, token by token; an answer leaves when all of it is recorded."""
    yield from _begin(completion.request, completion.response_id, completion.ended)
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


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as its client names it."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """The name that the model is shown."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class OfferedTools(NamedTuple):
    """The tools of a request: functions for the model, tools by these names, and types left out."""

    functions: list[Tool]
    named: dict[str, Offered]
    left_out: list[str]


def read_tools(sent: Fields) -> OfferedTools:
    """Read the tools of a body; refused if a tool is not known, or nobody could run any of them."""
    read = OfferedTools([], {}, [])
    for tool, path in sent.read_list("tools"):
        for offered, function in _read_tool(tool, path):
            if function is None:
                read.left_out.append(offered.name)
            elif read.named.setdefault(offered.shown, offered) != offered:
                problem = f"would be shown as {offered.shown}, as another tool is; rename one."
                raise fields.bad_field(path, problem)
            else:
                read.functions.append(function)
    fields.check_some_left(read.functions, read.left_out)
    return read


def name_chosen(chosen: Fields) -> str:
    """Return the name under which a tool is shown that a tool choice names."""
    kind, name = chosen.get("type", PLAIN), chosen.get("name")
    if isinstance(kind, str) and kind in CONTENTS:
        return kind
    if isinstance(kind, str) and (Api.RESPONSES, kind) in fields.TOOL_TYPES:
        raise fields.bad_field("tool_choice", f"names {kind}, which the client does not run.")
    if kind not in (PLAIN, CUSTOM):
        problem = f"is of type {kind!r}; only function, custom and allowed_tools are known."
        raise fields.bad_field("tool_choice", problem)
    if not isinstance(name, str):
        raise fields.bad_field("tool_choice", "names no function; give its name.")
    return Offered(str(kind), name, chosen.read(NAMESPACE, str)).shown


def read_call(item: Fields) -> ToolCall:
    kind, name = str(item.get("type")), item.get("name")
    arguments, text, call_id = item.get("arguments"), item.get(INPUT), item.get("call_id")
    if (built_in := kind.removesuffix(OF_CALL)) in CONTENTS:
        field, always = CONTENTS[built_in]
        said = item.read_object(field).items()
        given = {key: value for key, value in said if value not in (None, always.get(key))}
        return create_tool_call(built_in, json.dumps(given, ensure_ascii=False), call_id)
    if kind == "custom_tool_call":
        custom = json.dumps({INPUT: text}, ensure_ascii=False)
        arguments = custom if isinstance(text, str) else None
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise fields.bad_field(item.path, "has no name and arguments, or input.")
    shown = Offered(kind, name, item.read(NAMESPACE, str)).shown
    return create_tool_call(shown, arguments, call_id)


def read_output(item: Fields) -> tuple[str, str]:
    """Return the text of an item that is a call's output, and the id of the call."""
    output, path, kind = item.get("output"), item.path_of("output"), item.get("type")
    own = item.read("id", str) if kind == f"local_shell{OUTPUT}" else None
    call_id = item.read("call_id", str) or own or ""  # a local shell's is the output's own
    if kind == f"shell{OUTPUT}" and isinstance(output, list):
        return json.dumps(output, ensure_ascii=False), call_id
    if kind == f"apply_patch{OUTPUT}" and output is None:
        output, path = item.get("status"), item.path_of("status")
    return fields.read_text(output, path, PARTS), call_id


def write_call(call: ToolCall, named: Mapping[str, Offered]) -> JsonObject:
    """Write a call as the item of the tool's own kind, if its arguments are what that may have.

    With others it is the call of a function of this name, whose arguments may be any text.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool, said = named.get(name, Offered(PLAIN, name)), parse_text(arguments)
    of = {"call_id": call.get("id")}
    if tool.kind in CONTENTS and is_valid(
        fields.TOOL_TYPES[Api.RESPONSES, tool.kind]["call"], said
    ):
        field, always = CONTENTS[tool.kind]
        return {"type": tool.kind + OF_CALL, **of, field: {**always, **said}}
    of |= {"name": tool.name} | ({} if tool.namespace is None else {NAMESPACE: tool.namespace})
    if tool.kind == CUSTOM:
        text = said.get(INPUT) if isinstance(said, dict) else None
        if not isinstance(text, str):
            is_text = isinstance(arguments, str)
            text = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
        return {"type": "custom_tool_call", **of, INPUT: text}
    return {"type": "function_call", **of, "arguments": arguments}


def _read_tool(tool: object, path: str) -> Iterator[tuple[Offered, Tool | None]]:
    """Yield a tool, or those of a namespace, each with its function if the client runs it."""
    sent, kind = Fields(tool, path), fields.type_of(tool)
    if kind != NAMESPACE:
        yield _read_single(sent, kind, None)
        return
    namespace = sent.read("name", str)
    if not namespace:
        raise fields.bad_field(path, "has no name.")
    about = sent.read("description", str) or ""
    for inner, at in sent.read_list("tools"):
        offered, function = _read_single(Fields(inner, at), fields.type_of(inner), namespace)
        if function is not None and about:
            own = function["function"].get("description", "")
            function["function"]["description"] = f"{about}\n\n{own}".strip()
            about = ""  # it is told once, with the first function of the group
        yield offered, function


def _read_single(sent: Fields, kind: object, namespace: str | None) -> tuple[Offered, Tool | None]:
    name = sent.get("name")
    if kind not in (PLAIN, CUSTOM):
        function = fields.find_function(Api.RESPONSES, kind, sent.path)
        shown = {"type": PLAIN, "function": function}
        tool = None if function is None else read_tool(shown, sent.path)
        return Offered(str(kind), str(kind)), tool
    if not isinstance(name, str):
        raise fields.bad_field(sent.path, "has no name.")
    offered = Offered(str(kind), name, namespace)
    kept = {key: sent[key] for key in OF_FUNCTION if sent.get(key) is not None}
    if kind == CUSTOM:
        kept = {**kept, "parameters": _parameters_of_text(sent)}
    function = {"name": offered.shown, **kept}
    return offered, read_tool({"type": PLAIN, "function": function}, sent.path)


def _parameters_of_text(sent: Fields) -> JsonObject:
    """Return the parameters of a custom tool, with the grammar of its input if it has one."""
    form, text = sent.read_object("format"), {"type": "string"}
    if grammar := form.read("definition", str):
        syntax = form.read("syntax", str) or "given"
        text["description"] = f"A text of this {syntax} grammar:\n{grammar}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
