"""OpenAI's responses: a body → a request, a completion → an answer or its stream."""

from collections.abc import Iterator
from itertools import count
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
    object_of,
    text_of,
    typed,
)
from adapters.dialects.openai_fields import check_sampling, choice, error, form, logprobs
from adapters.dialects.sse import named

__all__ = ["answer", "error", "lines", "read"]

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"
KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt")
"""Fields that name something which OpenAI keeps, and nobody does here."""
ECHOED: dict[str, Any] = {
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
"""What an answer says of the request, with what it says where the client said nothing."""


def read(body: object) -> Request:
    """The request in a parsed body. What cannot be honoured and would mislead is refused."""
    sent = body_of(body)
    _check_fields(sent)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed(sent, "tools"))]
    return Request(
        model=sent["model"],
        messages=[*_instructions(sent), *_messages(sent)],
        tools=tools,
        max_tokens=at_least_one(sent, "max_output_tokens"),
        stop=[],
        fields={k: v for k, v in sent.items() if k not in ("input", "model")},
        format=form(object_of(sent, "text").get("format"), "text.format"),
        choice=choice(sent, tools),
    )


def answer(completion: Completion, chat: Chat) -> dict[str, Any]:
    """The body of the answer, with the token ids where vLLM puts them in chat completions."""
    return {
        **_envelope(completion, "incomplete" if _cut(completion) else "completed"),
        "output": _output(completion, chat),
        "usage": _usage(completion),
        "prompt_token_ids": list(completion.prompt_tokens),
        "token_ids": list(completion.sampled_tokens),
    }


def lines(completion: Completion, chat: Chat) -> Iterator[str]:
    """The same answer as it is streamed, its pieces numbered."""
    for number, piece in zip(count(), _pieces(completion, chat), strict=False):
        yield named({**piece, "sequence_number": number})


def _check_fields(body: Body) -> None:
    check_sampling(body)
    listed(body, "include")
    for name in ("store", "background"):
        typed(body, name, bool, "a boolean")
    for name in KEPT_ELSEWHERE:
        if body.get(name) is not None:
            text = f"{name} is set; nothing is kept here between calls, so send all items as input."
            raise bad(text, name)
    if body.get("background"):
        text = "background is true; a call here is answered while its client waits."
        raise bad(text, "background")


def _instructions(body: Body) -> list[Message]:
    text = typed(body, "instructions", str, "a string")
    return [{"role": "system", "content": text}] if text else []


def _messages(body: Body) -> list[Message]:
    sent = body.get("input")
    if isinstance(sent, str):
        return [{"role": "user", "content": sent}]
    items = listed(body, "input")
    if not items:
        raise bad("There is no input; send a text or an array of items.", "input")
    messages: list[Message] = []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[Message], item: Any, where: str) -> None:
    """The item as, or in, the last message: an assistant's turn is one message in a prompt."""
    if not isinstance(item, dict):
        raise bad(f"{where} is {kind(item)}; an item is an object.", where)
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            _turn(messages, begins=True)["reasoning_content"] = _reasoning(item, where)
        case "function_call":
            _turn(messages).setdefault("tool_calls", []).append(_call(item, where))
        case "function_call_output":
            content = text_of(item.get("output"), PARTS, f"{where}.output")
            name = typed(item, "call_id", str, "a string", f"{where}.") or ""
            messages.append({"role": "tool", "content": content, "tool_call_id": name})
        case other:
            text = f"{where} is of the type {other!r}; messages, reasoning, function calls and "
            raise bad(f"{text}their outputs are read here.", where)


def _add_message(messages: list[Message], item: Body, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role is {role!r}; it is one of {', '.join(ROLES)}.", f"{where}.role")
    content = text_of(item.get("content"), PARTS, f"{where}.content")
    if role == "assistant":
        turn = _turn(messages)
        if turn["content"] or turn.get("tool_calls"):
            turn = _turn(messages, begins=True)
        turn["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _turn(messages: list[Message], *, begins: bool = False) -> Message:
    """The assistant's message that is being put together, or a new one."""
    if begins or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: Body, where: str) -> str:
    return text_of(listed(item, "content", f"{where}."), ("reasoning_text",), f"{where}.content")


def _call(item: Body, where: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise bad(f"{where} has no name and arguments.", where)
    written = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call = item.get("call_id")
    return {"id": call, **written} if isinstance(call, str) else written


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as chat completions has it, which is how the models were taught."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        named = tool.get("type") if isinstance(tool, dict) else kind(tool)
        text = f"{where} is of the type {named!r}; only functions, which the client runs, are known"
        raise bad(f"{text} here.", where)
    if not isinstance(tool.get("name"), str):
        raise bad(f"{where} has no name.", where)
    kept = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in kept if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _cut(completion: Completion) -> bool:
    return completion.finish_reason == "length"


def _envelope(completion: Completion, status: str) -> dict[str, Any]:
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


def _output(completion: Completion, chat: Chat) -> list[dict[str, Any]]:
    """The items of the answer: what was thought, said and called."""
    message, status = completion.message, "incomplete" if _cut(completion) else "completed"
    said: list[tuple[str, dict[str, Any]]] = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        said.append(("reasoning", {"summary": [], "content": content}))
    if message["content"]:
        said.append(("message", {"role": "assistant", "content": [_text(completion, chat)]}))
    for call in message.get("tool_calls", ()):
        said.append(("function_call", {"call_id": call["id"], **call["function"]}))
    return [
        {"id": completion.place.name(f"item {i}"), "type": kinds, "status": status, **item}
        for i, (kinds, item) in enumerate(said)
    ]


def _text(completion: Completion, chat: Chat) -> dict[str, Any]:
    """The text of the answer; its log-probabilities, if asked for, are of all that was sampled."""
    asked = LOGPROBS in listed(completion.request.fields, "include")
    return {
        "type": "output_text",
        "text": completion.message["content"],
        "annotations": [],
        "logprobs": logprobs(completion, chat) if asked else [],
    }


def _usage(completion: Completion) -> dict[str, Any]:
    prompt, sampled = completion.counted
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _pieces(completion: Completion, chat: Chat) -> Iterator[dict[str, Any]]:
    """The whole of each item is one piece, since an answer leaves when it is recorded."""
    begun = {**_envelope(completion, "in_progress"), "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    whole = answer(completion, chat)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(item)}
        yield from _call_pieces(item, at) if "arguments" in item else _part_pieces(item, at)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    empty = {"arguments": ""} if "arguments" in item else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _call_pieces(item: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kinds, arguments = "response.function_call_arguments", item["arguments"]
    yield {"type": f"{kinds}.delta", **at, "delta": arguments}
    yield {"type": f"{kinds}.done", **at, "name": item["name"], "arguments": arguments}


def _part_pieces(item: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    kinds, at = f"response.{part['type']}", {**at, "content_index": 0}
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield {"type": "response.content_part.added", **at, "part": empty}
    yield {"type": f"{kinds}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kinds}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}
