"""The form an answer is asked to have: what the policy is told of it, and whether it kept to it.

The policy's answer is never altered: an answer of another form is given and recorded as it is.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from adapters.calls import Choice, Format, Message, Request
from adapters.dialects.fields import bad

LONGEST_ERROR = 300
NOWHERE: Registry[Any] = Registry()
"""Without it a schema's references to addresses would be fetched from there."""

UNUSABLE = (Unresolvable, RecursionError, re.error, ValueError, ArithmeticError)
"""What a schema raises that is well-formed and cannot be applied."""


def format_of(schema: Mapping[str, Any] | None, where: str) -> Format:
    """The form of a schema; one that is no JSON Schema is refused."""
    if schema is not None:
        try:
            Draft202012Validator.check_schema(schema)
        except (SchemaError, *UNUSABLE) as error:
            said = error.message if isinstance(error, SchemaError) else str(error)
            raise bad(f"{where} is not a JSON Schema: {said[:LONGEST_ERROR]}.", where) from error
    return Format(schema)


def format_instructions(request: Request) -> list[Message]:
    """What the model is shown after the messages: nothing, or one instruction.

    It stands at the end since it is about one answer only: a conversation goes on from the tokens
    it had, whatever form its next answer is asked to have.
    """
    said = " ".join([*_told_of_tools(request), *_told_of_format(request)])
    return [{"role": "system", "content": said}] if said else []


def outcomes(request: Request, message: Message) -> dict[str, Any]:
    """Whether the answer kept to the form it was asked for, as a span's attributes."""
    found: dict[str, Any] = {}
    if request.tools and request.choice != Choice():
        found["tool_choice"] = _choice_outcome(request.choice, message)
    if request.format is not None:
        found["format"] = _format_outcome(request.format, message)
    return found


def _told_of_tools(request: Request) -> list[str]:
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


def _told_of_format(request: Request) -> list[str]:
    if request.format is None:
        return []
    schema = request.format.schema
    start = "Unless you call a function, answer" if request.may_call else "Answer"
    if schema is None:
        return [f"{start} with nothing but a JSON object."]
    written = json.dumps(schema, ensure_ascii=False)
    return [f"{start} with nothing but JSON that fits this schema: {written}"]


def _choice_outcome(choice: Choice, message: Message) -> dict[str, Any]:
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    kept = (
        bool(called) >= (choice.mode == "required")
        and (not called or choice.mode != "none")
        and (not choice.names or set(called) <= {*choice.names})
        and (choice.parallel or len(called) <= 1)
    )
    asked = {"mode": choice.mode, "names": list(choice.names), "parallel": choice.parallel}
    return {**asked, "kept": kept}


def _format_outcome(form: Format, message: Message) -> dict[str, Any]:
    """`valid` is null where the answer is tool calls: those have a form of their own."""
    kind = "json_object" if form.schema is None else "json_schema"
    if message.get("tool_calls"):
        return {"kind": kind, "valid": None, "error": None}
    error = _error(form, message["content"])
    return {"kind": kind, "valid": error is None, "error": error and error[:LONGEST_ERROR]}


def _error(form: Format, text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if form.schema is None:
        return None if isinstance(value, dict) else f"not an object: {text}"
    validator = Draft202012Validator(form.schema, registry=NOWHERE)
    try:
        worst = best_match(validator.iter_errors(value))
    except UNUSABLE as error:
        return f"the schema cannot be applied: {error}"
    return worst and f"{worst.json_path}: {worst.message}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
