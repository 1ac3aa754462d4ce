"""Fields that OpenAI's two dialects share: numbers, the tool choice, the answer's format."""

from collections.abc import Callable, Sequence

from ratchet.adapters.calls import (
    Choice,
    Completion,
    Format,
    JsonObject,
    Refused,
    Request,
    Thinking,
    Tool,
)
from ratchet.adapters.dialects.fields import Fields, bad_field, bad_request, check_offered, type_of
from ratchet.adapters.rendering.chat import Chat

CHOICE_MODES = ("auto", "none", "required")
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def check_sampling(sent: Fields) -> None:
    """Refuse fields of a wrong type."""
    sent.check_ranges(NUMBERS)
    sent.check_top_k()
    sent.read("seed", int)
    sent.read("stream", bool)
    sent.read("parallel_tool_calls", bool)
    sent.read("top_logprobs", int)


def name_chosen(chosen: Fields) -> str:
    """Return the name of a function, which chat completions have in an object of its own."""
    kind, name = chosen.get("type", "function"), Fields(chosen.get("function", chosen)).get("name")
    if kind != "function":
        problem = f"is of type {kind!r}; only function and allowed_tools are known."
        raise bad_field("tool_choice", problem)
    if not isinstance(name, str):
        raise bad_field("tool_choice", "names no function; give its name.")
    return name


def read_choice(
    sent: Fields, tools: Sequence[Tool], name_chosen: Callable[[Fields], str] = name_chosen
) -> Choice:
    """Read the tool choice; it may name only `tools`, by the names that the model is shown."""
    chosen = sent.get("tool_choice")
    mode, names = "auto", ()
    if isinstance(chosen, dict):
        mode, names = _read_named_choice(Fields(chosen, "tool_choice"), name_chosen)
    elif isinstance(chosen, str) and chosen in CHOICE_MODES:
        mode = chosen
    elif chosen is not None:
        problem = f"is {chosen!r}; it is one of {', '.join(CHOICE_MODES)}, or names a function."
        raise bad_field("tool_choice", problem)
    check_offered(mode, names, tools)
    return Choice(mode, names, parallel=sent.get("parallel_tool_calls") is not False)


def read_format(value: object, path: str) -> Format | None:
    """Read the format of the answer; None means free text.

    Chat completions have the schema in an object of its own, responses have it beside the type.
    """
    named, sent = type_of(value), Fields(value, path)
    if value is None or named == "text":
        return None
    if named == "json_object":
        return Format()
    if named != "json_schema":
        text = f"{path}.type is {named!r}; it is text, json_object or json_schema."
        raise bad_request(text, path)
    written = sent.read_object("json_schema") if "json_schema" in sent else sent
    return Format(written.read("schema", dict), written.path_of("schema"))


def read_effort(sent: Fields, name: str) -> Thinking | None:
    """Read whether the model is not to think at all; there are no levels."""
    off = sent.read(name, str) == "none"
    return Thinking(on=False, where=sent.path_of(name), hint=True) if off else None


def write_logprobs(completion: Completion, chat: Chat) -> list[JsonObject]:
    """Write a row for each token id, the end-of-turn token included, as vLLM does."""
    found: list[JsonObject] = []
    for token, logprob in zip(completion.response_token_ids, completion.logprobs, strict=True):
        text, data = chat.spelling(token)
        found.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return found


def write_error(refused: Refused) -> JsonObject:
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


def _read_named_choice(
    chosen: Fields, name_chosen: Callable[[Fields], str]
) -> tuple[str, tuple[str, ...]]:
    """Return the mode and the names of the only functions that may be called."""
    if chosen.get("type") is None:
        raise bad_field("tool_choice", "has no type; it is function or allowed_tools.")
    if chosen.get("type") != "allowed_tools":
        return "required", (name_chosen(chosen),)
    allowed = Fields(chosen.read_object("allowed_tools") or chosen, chosen.path)
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required") or not isinstance(mode, str):
        raise bad_request(f"tool_choice.mode is {mode!r}; it is auto or required.", "tool_choice")
    tools = allowed.read("tools", list) or ()
    return mode, tuple(name_chosen(Fields(tool, "tool_choice")) for tool in tools)
