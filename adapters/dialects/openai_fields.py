"""Fields that OpenAI's two dialects share: numbers, the tool choice, the answer's format."""

from collections.abc import Mapping, Sequence

from adapters.calls import Choice, Completion, Format, JsonObject, Refused, Request, Tool
from adapters.dialects.fields import (
    Body,
    bad_request,
    check_ranges,
    json_type,
    read_field,
    read_list,
    read_object,
)
from adapters.rendering.chat import Chat

MODES = ("auto", "none", "required")
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def check_sampling(body: Body) -> None:
    """Refuse fields of a wrong type, and `top_logprobs`, which no sampler here can answer."""
    check_ranges(body, NUMBERS)
    for name, kinds, article in (
        ("seed", int, "an integer"),
        ("stream", bool, "a boolean"),
        ("parallel_tool_calls", bool, "a boolean"),
    ):
        read_field(body, name, kinds, article)
    alternatives = read_field(body, "top_logprobs", int, "an integer")
    if alternatives:
        raise bad_request(
            f"top_logprobs is {alternatives}; only the log-probability of the sampled token is "
            "known here, so leave it out.",
            "top_logprobs",
        )


def read_choice(body: Body, tools: Sequence[Tool]) -> Choice:
    """Read the tool choice; it may name only `tools`."""
    parallel = body.get("parallel_tool_calls") is not False
    chosen = body.get("tool_choice")
    if isinstance(chosen, str) and chosen in MODES:
        mode, names = chosen, ()
    elif isinstance(chosen, dict):
        mode, names = _read_named_choice(chosen)
    elif chosen is None:
        mode, names = "auto", ()
    else:
        text = f"tool_choice is {chosen!r}; it is one of {', '.join(MODES)}, or names a function."
        raise bad_request(text, "tool_choice")
    check_offered(mode, names, tools)
    return Choice(mode, names, parallel)


def check_offered(mode: str, names: Sequence[str], tools: Sequence[Tool]) -> None:
    """Refuse a choice of a function that is not among `tools`, and a required call without any."""
    offered = [tool["function"]["name"] for tool in tools]
    if mode == "required" and not offered:
        text = "tool_choice asks for a call, and there are no tools; send some."
        raise bad_request(text, "tool_choice")
    for name in names:
        if name not in offered:
            text = f"tool_choice names {name!r}; the tools are: {', '.join(offered) or 'none'}."
            raise bad_request(text, "tool_choice")


def read_format(value: object, where: str) -> Format | None:
    """Read the format of the answer; None means free text.

    Chat completions have the schema in an object of its own, responses have it beside the type.
    """
    if value is None:
        return None
    named = value.get("type") if isinstance(value, dict) else json_type(value)
    if named == "text":
        return None
    if named == "json_object":
        return Format()
    if not isinstance(value, dict) or named != "json_schema":
        text = f"{where}.type is {named!r}; it is text, json_object or json_schema."
        raise bad_request(text, where)
    inner = "json_schema" in value
    written = read_object(value, "json_schema", f"{where}.") if inner else value
    place = f"{where}.json_schema." if inner else f"{where}."
    return Format(read_field(written, "schema", dict, "an object", place), f"{place}schema")


def write_logprobs(completion: Completion, chat: Chat) -> list[JsonObject]:
    """Write a row for each token id, the end-of-turn token included, as vLLM does."""
    found: list[JsonObject] = []
    for token, logprob in zip(completion.response_token_ids, completion.logprobs, strict=True):
        text, data = chat.spelling(token)
        found.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return found


def write_error(refused: Refused) -> JsonObject:
    """Write the body of a refusal."""
    kinds = "invalid_request_error" if refused.status < 500 else "server_error"
    shown = {"message": refused.message, "type": kinds}
    return {"error": {**shown, "param": refused.param, "code": refused.code}}


def to_chat_fields(request: Request) -> JsonObject:
    """Return a request's attributes as fields of chat completions; None where one is not set."""
    return {
        "max_tokens": request.max_tokens,
        "max_completion_tokens": None,
        "stop": list(request.stop) or None,
        "tool_choice": _write_choice(request.choice),
        "parallel_tool_calls": None if request.choice.parallel else False,
        "response_format": request.fields.get("response_format") or _write_format(request.format),
    }


def _write_choice(choice: Choice) -> str | JsonObject | None:
    functions: list[JsonObject] = [
        {"type": "function", "function": {"name": name}} for name in choice.names
    ]
    if not functions:
        return None if choice.mode == "auto" else choice.mode
    if choice.mode == "required" and len(functions) == 1:
        return functions[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": functions}}


def _write_format(form: Format | None) -> JsonObject | None:
    if form is None:
        return None
    if form.schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}


def _read_named_choice(chosen: Body) -> tuple[str, tuple[str, ...]]:
    """Return the mode and the names of the only functions that may be called."""
    kinds = chosen.get("type")
    if kinds == "function":
        return "required", (_name(chosen),)
    if kinds != "allowed_tools":
        text = f"tool_choice is of type {kinds!r}; only function and allowed_tools are known."
        raise bad_request(text, "tool_choice")
    allowed = read_object(chosen, "allowed_tools", "tool_choice.") or chosen
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required") or not isinstance(mode, str):
        raise bad_request(f"tool_choice.mode is {mode!r}; it is auto or required.", "tool_choice")
    return mode, tuple(_name(tool) for tool in read_list(allowed, "tools", "tool_choice."))


def _name(tool: object) -> str:
    """Return the name of a function, which chat completions have in an object of its own."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice names no function; give its name.", "tool_choice")
    return name
