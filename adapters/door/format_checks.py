"""The check of an answer against a client's schema, in a process that the system stops in time.

A few lines of schema can make a check of hours or of gigabytes, by references that double, regular
expressions or comparisons of items, and no thread can be stopped.
"""

import json
from asyncio import get_running_loop
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NoReturn

from jsonschema_rs import Draft202012Validator, FancyRegexOptions, ReferencingError, ValidationError

from ratchet.adapters.calls import Choice, Format, JsonObject, Message, Request
from ratchet.adapters.dialects.fields import bad_field, refuse_constant
from ratchet.adapters.dialects.instructions import choice_outcome
from ratchet.adapters.process.child import LimitedChild, LimitMet, answer_questions

LONGEST_CHECK = 1.0
"""Bound on the processor time of a check, in seconds."""
MOST_MEMORY = 1024 * 1024 * 1024
"""Bound on the memory of the process, in bytes."""
LONGEST_ERROR = 300
BACKTRACKS = FancyRegexOptions(backtrack_limit=100_000)
"""Bound on a match of a schema's regular expression, which takes linear time in most cases."""

Found = tuple[bool | None, str | None]
"""Whether a value is valid, and why it is not or, with None, why it was not checked."""


class FormatChecks:
    """Checks of formats, one at a time; the process starts with the first and after each death."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "formats")
        self._child = LimitedChild("ratchet.adapters.door.format_checks", MOST_MEMORY)

    def close(self) -> None:
        """Wait for the check under way, and end the process."""
        self._thread.shutdown()
        self._child.close()

    async def check_schema(self, form: Format | None) -> None:
        """Refuse a format whose schema is not a JSON Schema, or whose reading meets the limits."""
        if form is None or form.schema is None:
            return
        valid, error = await self._ask(form.schema, None)
        if not valid:
            kind = "cannot be used" if valid is None else "is not a JSON Schema"
            raise bad_field(form.where, f"{kind}: {error}.")

    async def outcomes(self, request: Request, message: Message) -> dict[str, JsonObject]:
        """Return whether an answer follows the tool choice and the format that were asked for.

        `valid` is null if the answer was not checked, or has tool calls, whose format is another.
        """
        found: dict[str, JsonObject] = {}
        if request.tools and request.choice != Choice():
            found["tool_choice"] = choice_outcome(request.choice, message)
        if request.format is not None:
            schema, valid, error = request.format.schema, None, None
            if not message.get("tool_calls"):
                valid, error = await self._ask(schema, message["content"])
            kind = "json_object" if schema is None else "json_schema"
            found["format"] = {"kind": kind, "valid": valid, "error": error}
        return found

    async def _ask(self, schema: Mapping[str, object] | None, text: str | None) -> Found:
        return await get_running_loop().run_in_executor(self._thread, self._check, schema, text)

    def _check(self, schema: Mapping[str, object] | None, text: str | None) -> Found:
        """Ask the process, which dies of a check that meets a limit."""
        written = None if schema is None else json.dumps(schema)
        try:
            valid, error = self._child.ask([written, text], LONGEST_CHECK)
        except LimitMet as met:
            return None, (
                f"not checked, since the check {met}; it may take {LONGEST_CHECK:g} s of processor "
                f"time and {MOST_MEMORY >> 20} MiB of memory"
            )
        return valid, error


def _answer(question: tuple[str | None, str | None]) -> Found:
    """Check what the door asks: a schema's text or null, and an answer's text or null."""
    valid, error = find_error(*question)
    return valid, error and error[:LONGEST_ERROR]


def find_error(schema: str | None, text: str | None) -> Found:
    """Check a text against a schema, or the schema itself if there is no text."""
    if text is None:
        try:
            _validator(schema or "{}")
        except ValidationError as error:
            return False, error.message
        except (ReferencingError, ValueError) as error:
            return False, str(error)
        return True, None
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        return False, f"not JSON: {error}"
    if schema is None:
        fits = isinstance(value, dict)
        return fits, None if fits else f"not an object: {text}"
    try:
        first = next(_validator(schema).iter_errors(value), None)
    except ValueError as error:  # nested too deeply, or a number that is too large
        return None, f"not checked: {error}"
    steps = first.instance_path if first else ()
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return first is None, first and f"${path}: {first.message}"


@lru_cache(maxsize=8)
def _validator(schema: str) -> Draft202012Validator:
    read = json.loads(schema)
    return Draft202012Validator(read, retriever=_fetch_nothing, pattern_options=BACKTRACKS)


def _fetch_nothing(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is not fetched; write what it holds under $defs")


if __name__ == "__main__":
    answer_questions(_answer, MOST_MEMORY)
