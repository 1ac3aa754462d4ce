"""The check of an answer against a client's schema, in a process that the system stops in time.

A few lines of schema can make a check of hours or of gigabytes, by references that double, regular
expressions or comparisons of items, and no thread can be stopped.
"""

import json
import resource
import signal
import subprocess
import sys
from asyncio import get_running_loop
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from select import POLLIN, poll
from typing import NoReturn

from jsonschema_rs import Draft202012Validator, FancyRegexOptions, ReferencingError, ValidationError

from adapters.calls import Choice, Format, JsonObject, Message, Request
from adapters.dialects.fields import bad_field, refuse_constant
from adapters.dialects.structured import choice_outcome
from adapters.process.children import keep_from_children

LONGEST_CHECK = 1.0
"""Bound on the processor time of a check, in seconds."""
LONGEST_WAIT = 60.0
"""Bound on the time until a check answers, in seconds, for a process that does not run."""
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
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Wait for the check under way, and end the process."""
        self._thread.shutdown()
        if self._process is not None:
            self._process.kill()  # it may be stopped, and would not see the end of its stdin
            self._process.communicate()

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
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        written = None if schema is None else json.dumps(schema)
        try:
            process.stdin.write(json.dumps([written, text]).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # there is no answer to read either
        answered = poll()  # unlike select(), for descriptors of any number
        answered.register(process.stdout, POLLIN)
        if not answered.poll(1000 * LONGEST_WAIT):
            process.kill()
        answer = process.stdout.readline()
        if answer:
            valid, error = json.loads(answer)
            return valid, error
        self._process = None
        process.communicate()
        return None, (
            f"not checked, since the check ended with status {process.returncode}; it may take "
            f"{LONGEST_CHECK:g} s of processor time and {MOST_MEMORY >> 20} MiB of memory"
        )


def _start() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "adapters.door.format_checks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not reach it: it ends with its stdin
    )
    assert process.stdin is not None
    keep_from_children(process.stdin)
    return process


def main() -> None:
    """Answer each line of stdin, a schema's text or null and an answer's text or null."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, LONGEST_CHECK)  # whose signal ends the process
        valid, error = find_error(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([valid, error and error[:LONGEST_ERROR]]), flush=True)  # noqa: T201


def find_error(schema: str | None, text: str | None) -> Found:
    """Check a text against a schema, or the schema itself if there is no text."""
    if text is None:
        error = None if schema is None else _schema_error(schema)
        return error is None, error
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
    return first is None, first and f"{_json_path(first.instance_path)}: {first.message}"


def _schema_error(schema: str) -> str | None:
    try:
        _validator(schema)
    except ValidationError as error:
        return error.message
    except (ReferencingError, ValueError) as error:
        return str(error)
    return None


@lru_cache(maxsize=8)
def _validator(schema: str) -> Draft202012Validator:
    read = json.loads(schema)
    return Draft202012Validator(read, retriever=_fetch_nothing, pattern_options=BACKTRACKS)


def _fetch_nothing(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is not fetched; write what it holds under $defs")


def _json_path(path: Sequence[str | int]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


if __name__ == "__main__":
    main()
