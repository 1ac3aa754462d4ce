"""Fields of a client's body: each has the type it must have, or is refused by name."""

from collections.abc import Mapping
from typing import TypeVar

from adapters.calls import Completion, FunctionCall, JsonObject, Refused, ToolCall

Body = Mapping[str, object]
MOST_STOPS = 16
TOKENS = "return_token_ids"
"""Field that asks for token ids. Nobody else gets them, since many clients quote whole answers in
their errors."""

T = TypeVar("T")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """Return the refusal of a request that is wrong in itself."""
    return Refused(400, message, param=param, code=code)


def json_type(value: object) -> str:
    """Name the JSON type of a value, with its article."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def check_body(value: object) -> tuple[Body, str]:
    """Return the body, which must be an object, and the model that it names."""
    if not isinstance(value, dict):
        raise bad_request(f"The body is {json_type(value)}; send a JSON object.")
    model = read_field(value, "model", str, "a string")
    if not model:
        raise bad_request("There is no model; name one, any name will do.", "model")
    return value, model


def read_field(
    body: Body, name: str, types: type[T] | tuple[type[T], ...], article: str, where: str = ""
) -> T | None:
    """Return a field, or None if it is missing or null.

    A value of another type is refused. JSON's true is not a number, though Python's is.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, types) and (types is bool or not isinstance(value, bool)):
        return value
    field = where + name
    raise bad_request(f"{field} is {json_type(value)}; it must be {article}.", field)


def refuse_constant(name: str) -> None:
    """Refuse (ValueError) NaN and the infinities, which Python's parser of JSON accepts."""
    raise ValueError(f"{name} is not a JSON number")


def wants_tokens(fields: Mapping[str, object]) -> bool:
    """Return whether a client asked for the token ids of its answer, by vLLM's field."""
    return read_field(fields, TOKENS, bool, "a boolean") or False


def write_prompt_tokens(completion: Completion) -> JsonObject:
    """Write the token ids of a prompt, if they were asked for."""
    asked = wants_tokens(completion.request.fields)
    return {"prompt_token_ids": list(completion.prompt_token_ids)} if asked else {}


def write_sampled_tokens(completion: Completion) -> JsonObject:
    """Write the token ids of an answer, if they were asked for."""
    asked = wants_tokens(completion.request.fields)
    return {"token_ids": list(completion.response_token_ids)} if asked else {}


def write_tokens(completion: Completion) -> JsonObject:
    """Write the token ids of a prompt and its answer, if they were asked for."""
    return write_prompt_tokens(completion) | write_sampled_tokens(completion)


def read_list(body: Body, name: str, where: str = "") -> list[object]:
    """Return an array, empty if the field is missing or null."""
    return read_field(body, name, list, "an array", where) or []


def read_object(body: Body, name: str, where: str = "") -> JsonObject:
    """Return an object, empty if the field is missing or null."""
    return read_field(body, name, dict, "an object", where) or {}


def check_ranges(body: Body, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a field that is not a number or is out of its range."""
    for name, (least, most) in ranges.items():
        value = read_field(body, name, (int, float), "a number")
        if value is not None and not least <= value <= most:
            raise bad_request(f"{name} is {value}; it must be from {least} to {most}.", name)


def read_count(body: Body, *names: str) -> int | None:
    """Return the first of these fields that is set, a whole number above 0; None if none is set."""
    values = [read_field(body, name, int, "an integer") for name in names]
    for name, value in zip(names, values, strict=True):
        if value is not None and value < 1:
            raise bad_request(f"{name} is {value}; it must be at least 1.", name)
    return next((value for value in values if value is not None), None)


def read_stops(body: Body, name: str) -> list[str]:
    """Return the stop strings; the field may also be a single one."""
    value = body.get(name)
    sent = [value] if isinstance(value, str) else read_list(body, name)
    stops = [stop for stop in sent if isinstance(stop, str) and stop]
    if len(sent) > MOST_STOPS or len(stops) < len(sent):
        text = f"{name} must be a string or up to {MOST_STOPS} of them, none empty."
        raise bad_request(text, name)
    return stops


def read_text(content: object, kinds: tuple[str, ...], where: str) -> str:
    """Return the text of a message's content, which may be an array of parts of these kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        text = f"{where} is {json_type(content)}; it must be text or an array of parts."
        raise bad_request(text, where)
    return "".join(_text_of_part(part, kinds, f"{where}[{i}]") for i, part in enumerate(content))


def _text_of_part(part: object, kinds: tuple[str, ...], where: str) -> str:
    named = part.get("type") if isinstance(part, dict) else json_type(part)
    text = None
    if isinstance(part, dict) and named in kinds:
        text = part.get("refusal" if named == "refusal" else "text")
    if not isinstance(text, str):
        raise bad_request(f"{where} is a part of type {named!r}; only text is read here.", where)
    return text


def create_tool_call(name: str, arguments: str | JsonObject, call_id: object) -> ToolCall:
    """Return a tool call as chat completions have it; an id that is not a string is left out."""
    function: FunctionCall = {"name": name, "arguments": arguments}
    if isinstance(call_id, str):
        return {"id": call_id, "type": "function", "function": function}
    return {"type": "function", "function": function}
