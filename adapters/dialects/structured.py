"""The format a client asks for: the model's instructions, and whether the answer follows them.

An answer is never altered: one of another format is returned and recorded as it is.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jsonschema_rs import (
    Draft202012Validator,
    FancyRegexOptions,
    ReferencingError,
    ValidationError,
)

from adapters.calls import Choice, Format, JsonObject, Message, Request
from adapters.dialects.fields import bad_request

LONGEST_ERROR = 300
BACKTRACKS = FancyRegexOptions(backtrack_limit=100_000)
"""Bound on a schema's regular expressions, whose matching takes linear time in most cases."""


def create_format(schema: Mapping[str, object] | None, where: str) -> Format:
    """Return the format of a schema; Refused if it is not a JSON Schema."""
    if schema is not None:
        try:
            _validator(schema)
        except (ValidationError, ReferencingError, ValueError) as error:
            said = error.message if isinstance(error, ValidationError) else str(error)
            raise bad_request(
                f"{where} is not a JSON Schema: {said[:LONGEST_ERROR]}.", where
            ) from error
    return Format(schema)


def format_instructions(request: Request) -> list[Message]:
    """Return the instruction that the model is shown after the messages, if there is one.

    It comes last since it concerns one answer only: a conversation continues from its own tokens
    whatever format its next answer has.
    """
    said = " ".join([*_tool_instructions(request), *_format_instruction(request)])
    return [{"role": "system", "content": said}] if said else []


def outcomes(request: Request, message: Message) -> dict[str, JsonObject]:
    """Return a span's attributes that say whether the answer follows the requested format."""
    found: dict[str, JsonObject] = {}
    if request.tools and request.choice != Choice():
        found["tool_choice"] = _choice_outcome(request.choice, message)
    if request.format is not None:
        found["format"] = _format_outcome(request.format, message)
    return found


def _tool_instructions(request: Request) -> list[str]:
    choice = request.choice
    if not request.tools:
        return []
    if choice.mode == "none":
        return ["Call no function; answer in words."]
    said = ["Call a function."] if choice.mode == "required" else []
    if choice.names:
        said.append(f"Call no other function than {' or '.join(choice.names)}.")
    if not choice.parallel:
        said.append("Call at most one function.")
    return said


def _format_instruction(request: Request) -> list[str]:
    if request.format is None:
        return []
    schema = request.format.schema
    start = "Unless you call a function, answer" if request.may_call_tools else "Answer"
    if schema is None:
        return [f"{start} with nothing but a JSON object."]
    written = json.dumps(schema, ensure_ascii=False)
    return [f"{start} with nothing but JSON that fits this schema: {written}"]


def _choice_outcome(choice: Choice, message: Message) -> JsonObject:
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    kept = (
        bool(called) >= (choice.mode == "required")
        and (not called or choice.mode != "none")
        and (not choice.names or set(called) <= {*choice.names})
        and (choice.parallel or len(called) <= 1)
    )
    asked = {"mode": choice.mode, "names": list(choice.names), "parallel": choice.parallel}
    return {**asked, "kept": kept}


def _format_outcome(form: Format, message: Message) -> JsonObject:
    """Check the answer; `valid` is null if it has tool calls, whose format is another one."""
    kind = "json_object" if form.schema is None else "json_schema"
    if message.get("tool_calls"):
        return {"kind": kind, "valid": None, "error": None}
    error = _find_error(form, message["content"])
    return {"kind": kind, "valid": error is None, "error": error and error[:LONGEST_ERROR]}


def _find_error(form: Format, text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if form.schema is None:
        return None if isinstance(value, dict) else f"not an object: {text}"
    try:
        first = next(_validator(form.schema).iter_errors(value), None)
    except ValueError as error:  # nested too deeply, or a number that is too large
        return f"cannot be checked: {error}"
    return first and f"{_json_path(first.instance_path)}: {first.message}"


def _validator(schema: Mapping[str, object]) -> Draft202012Validator:
    return Draft202012Validator(dict(schema), retriever=_fetch_nothing, pattern_options=BACKTRACKS)


def _fetch_nothing(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is not fetched; write what it holds under $defs")


def _json_path(place: Sequence[str | int]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
