"""OpenAI's chat completions: a body → a request, a completion → an answer or its chunks."""

from collections.abc import Iterator, Mapping
from typing import Any

from adapters.calls import Completion, Message, Refused, Request
from adapters.chat import Chat

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_STOPS = 16
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
Body = Mapping[str, Any]


def read(body: object) -> Request:
    """The request in a parsed body. What cannot be honoured and would mislead is refused."""
    if not isinstance(body, dict):
        raise _bad(f"The body is {_kind(body)}; send a JSON object.")
    _check_fields(body)
    tools = [_tool(tool, i) for i, tool in enumerate(_list(body, "tools"))]
    return Request(
        model=body["model"],
        messages=_messages(body),
        tools=[] if body.get("tool_choice") == "none" else tools,
        max_tokens=_most_tokens(body),
        stop=_stops(body),
        fields={k: v for k, v in body.items() if k not in ("messages", "tools", "model")},
    )


def answer(completion: Completion, chat: Chat) -> dict[str, Any]:
    """The body of the answer, with the token ids where vLLM puts them."""
    choice = {
        "index": 0,
        "message": {"refusal": None, **_visible(completion.message)},
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion, chat),
        "token_ids": list(completion.sampled_tokens),
    }
    return {
        **_envelope(completion, "chat.completion"),
        "choices": [choice],
        "usage": _usage(completion),
        "prompt_token_ids": list(completion.prompt_tokens),
    }


def chunks(completion: Completion, chat: Chat) -> Iterator[dict[str, Any]]:
    """The same answer in pieces: role, content, tool calls, the finish with its tokens, usage."""
    envelope = _envelope(completion, "chat.completion.chunk")
    message = completion.message
    if _wants_usage(completion):
        envelope["usage"] = None

    def chunk(delta: dict[str, Any], **of_choice: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **of_choice}
        return {**envelope, "choices": [choice]}

    opening = chunk({"role": "assistant", "content": ""})
    yield {**opening, "prompt_token_ids": list(completion.prompt_tokens)}
    for key in ("reasoning_content", "content"):
        if message.get(key):
            yield chunk({key: message[key]})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk(
        {},
        finish_reason=completion.finish_reason,
        logprobs=_logprobs(completion, chat),
        token_ids=list(completion.sampled_tokens),
    )
    if _wants_usage(completion):
        yield {**envelope, "choices": [], "usage": _usage(completion)}


def error(refused: Refused) -> dict[str, Any]:
    """The body of a refusal."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "error": {
            "message": refused.message,
            "type": kind,
            "param": refused.param,
            "code": refused.code,
        }
    }


def models(name: str) -> dict[str, Any]:
    """The list of the one model there is."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ratchet"}
    return {"object": "list", "data": [model]}


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


def _usage(completion: Completion) -> dict[str, int]:
    prompt, sampled = len(completion.prompt_tokens), len(completion.sampled_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _logprobs(completion: Completion, chat: Chat) -> dict[str, Any] | None:
    """Aligned with the token ids, so with the end-of-turn token, like vLLM's."""
    if not completion.request.fields.get("logprobs"):
        return None
    content = []
    for token, logprob in zip(completion.sampled_tokens, completion.logprobs, strict=True):
        text, data = chat.spelling(token)
        content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _wants_usage(completion: Completion) -> bool:
    options = completion.request.fields.get("stream_options")
    return bool(options and options.get("include_usage"))


def _bad(message: str, param: str | None = None, code: str | None = None) -> Refused:
    return Refused(400, message, param=param, code=code)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _check_fields(body: Body) -> None:
    _typed(body, "model", str, "a string")
    if not body.get("model"):
        raise _bad("There is no model; name one, any name will do.", "model")
    for name in ("stream", "logprobs"):
        _typed(body, name, bool, "a boolean")
    for name in ("stream_options", "response_format"):
        _typed(body, name, dict, "an object")
    for name, (least, most) in NUMBERS.items():
        value = _typed(body, name, (int, float), "a number")
        if value is not None and not least <= value <= most:
            raise _bad(f"{name} is {value}; it goes from {least} to {most}.", name)
    many = _typed(body, "n", int, "an integer")
    if many not in (None, 1):
        raise _bad(
            f"n is {many}; this endpoint gives one answer a call, so make {many} calls.", "n"
        )
    for name in ("functions", "function_call"):
        if body.get(name):
            raise _bad(f"{name} is the old form of tools and is not read here; send tools.", name)


def _typed(body: Body, name: str, kind: Any, article: str) -> Any:
    """The field, or None. JSON's true is no number, though Python's is."""
    value = body.get(name)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if value is not None and (wrong_bool or not isinstance(value, kind)):
        raise _bad(f"{name} is {_kind(value)}; it must be {article}.", name)
    return value


def _list(body: Body, name: str) -> list[Any]:
    return _typed(body, name, list, "an array") or []


def _most_tokens(body: Body) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _typed(body, name, int, "an integer")
        if value is not None and value < 1:
            raise _bad(f"{name} is {value}; it must be at least 1.", name)
        if value is not None:
            return value
    return None


def _stops(body: Body) -> list[str]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else _list(body, "stop")
    if len(stops) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad(f"stop must be a string or up to {MOST_STOPS} of them, none empty.", "stop")
    return stops


def _tool(tool: Any, index: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        where = f"tools[{index}]"
        raise _bad(f'{where} is not {{"type": "function", "function": {{"name": …}}}}.', where)
    return tool


def _messages(body: Body) -> list[Message]:
    messages = _list(body, "messages")
    if not messages:
        raise _bad("There are no messages; send at least one.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    """The message with its content as text and nothing that a renderer does not read."""
    if not isinstance(message, dict):
        raise _bad(f"{where} is {_kind(message)}; a message is an object.", where)
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"{where}.role is {role!r}; it is one of {', '.join(ROLES)}.", f"{where}.role")
    read: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), role, f"{where}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if role == "assistant" and message.get("tool_calls"):
        calls = _list(message, "tool_calls")
        read["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return read


def _content(content: Any, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where} is {_kind(content)}; it must be text or an array of parts.", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise _bad(f"{where} is a part of the type {kind!r}; only text is read here.", where)
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise _bad(f"{where} has no function with a name and arguments.", where)
    written = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **written} if isinstance(call.get("id"), str) else written
