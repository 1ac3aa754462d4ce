"""Fields of a client's body: what becomes of each, its type, and what all dialects write.

A field or a type of tools without a row in fields.yaml is refused by its name. Null is no field.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import TypeVar

from ratchet.adapters.calls import Completion, JsonObject, Refused, Thinking, Tool, ToolFunction
from ratchet.adapters.rendering.messages import json_type, read_content
from ratchet.adapters.rendering.renderer_names import SWITCHES
from ratchet.adapters.yaml_text import read_yaml

MOST_STOPS = 16
RETURN_TOKEN_IDS = "return_token_ids"
"""Field that asks for token ids, as vLLM names it; other clients would quote them in errors."""

NUMBER = (int, float)
EXPECTED: Mapping[object, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    NUMBER: "a number",
    list: "an array",
    dict: "an object",
}
"""Names of the JSON types as a field must have them."""

T = TypeVar("T")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """Return the refusal of a request that is wrong in itself."""
    return Refused(400, message, param=param, code=code)


def bad_field(path: str, problem: str) -> Refused:
    """Return the refusal of the field at `path`; the message is the path and then the problem."""
    return bad_request(f"{path} {problem}", path)


class Fields(dict[str, object]):
    """The fields of an object in a client's body, and its path there, which is empty for the body.

    A value that is no object has no fields.
    """

    def __init__(self, value: object, path: str = "") -> None:
        super().__init__(value if isinstance(value, dict) else {})
        self.path = path

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def read(self, name: str, kind: type[T] | tuple[type[T], ...]) -> T | None:
        """Return a field, or None if it is missing or null.

        A value of another type is refused. JSON's true is not a number, though Python's is.
        """
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise bad_field(self.path_of(name), f"is {json_type(value)}; it must be {EXPECTED[kind]}.")

    def read_list(self, name: str) -> list[tuple[object, str]]:
        """Return the values of an array and their paths; [] if the field is missing or null."""
        values = self.read(name, list) or []
        return [(value, f"{self.path_of(name)}[{i}]") for i, value in enumerate(values)]

    def read_some(self, name: str) -> list[tuple[object, str]]:
        """Return the values of an array, which must have some, and their paths."""
        if not (values := self.read_list(name)):
            raise bad_request(f"There are no {name}; send at least one.", name)
        return values

    def read_object(self, name: str) -> "Fields":
        """Return the fields of an object, empty if the field is missing or null."""
        return Fields(self.read(name, dict), self.path_of(name))

    def read_count(self, *names: str) -> int | None:
        """Return the first of these fields that is set, a whole number above 0, or None."""
        values = [self.read(name, int) for name in names]
        for name, value in zip(names, values, strict=True):
            if value is not None and value < 1:
                raise bad_field(self.path_of(name), f"is {value}; it must be at least 1.")
        return next((value for value in values if value is not None), None)

    def read_stops(self, name: str) -> list[str]:
        """Return the stop strings; the field may also be a single one."""
        value = self.get(name)
        sent = [value] if isinstance(value, str) else self.read(name, list) or []
        stops = [stop for stop in sent if isinstance(stop, str) and stop]
        if len(sent) > MOST_STOPS or len(stops) < len(sent):
            problem = f"must be a string or up to {MOST_STOPS} of them, none empty."
            raise bad_field(self.path_of(name), problem)
        return stops

    def check_ranges(self, ranges: Mapping[str, tuple[float, float]]) -> None:
        for name, (least, most) in ranges.items():
            value = self.read(name, NUMBER)
            if value is not None and not least <= value <= most:
                problem = f"is {value}; it must be from {least} to {most}."
                raise bad_field(self.path_of(name), problem)

    def check_top_k(self) -> None:
        value = self.read("top_k", int)
        if value is not None and value < -1:
            problem = f"is {value}; it must be the number of the likeliest tokens, or -1 for all."
            raise bad_field(self.path_of("top_k"), problem)

    def without(self, *names: str) -> JsonObject:
        return {name: value for name, value in self.items() if name not in names}


class Api(StrEnum):
    CHAT = "chat completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GOOGLE = "generateContent"


class Fate(StrEnum):
    HONOURED = "honoured"
    HINT = "hint"
    """Obeyed as far as a policy has a setting for it; otherwise the record names the field."""
    SAMPLING = "sampling"
    """Said by the recipe in a run, and by the client where `ratchet serve` answers."""
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """The fate of fields, and why.

    Values of `unless` ask for nothing, so they are not refused, or are no hints that nobody obeys.
    """

    names: tuple[str, ...]
    fate: Fate
    why: str
    unless: tuple[object, ...]
    apis: tuple[Api, ...]

    def excepts(self, value: object) -> bool:
        """Return whether a value asks for nothing; JSON's false is not the number 0."""
        same = (one for one in self.unless if isinstance(one, bool) == isinstance(value, bool))
        return value is None or value in same


_TABLES = read_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES = tuple(
    Rule(
        tuple(row["names"]),
        Fate(row["fate"]),
        row["why"],
        tuple(row.get("unless", ())),
        tuple(Api[api.upper()] for api in row["of"]),
    )
    for row in _TABLES["fields"]
)
TOOL_TYPES = {
    (Api[row["of"].upper()], name): row for row in _TABLES["tool_types"] for name in row["types"]
}
"""By the API and the type: the row of tools, with the `function` that the client runs, or why they
are `refused`. The client does not run tools of a row with neither."""


def rules_of(api: Api) -> dict[str, Rule]:
    """Return the rule of each field that an API is known to have."""
    return {name: rule for rule in RULES if api in rule.apis for name in rule.names}


def check_fields(sent: Fields, api: Api, passed: Collection[str] = ()) -> None:
    """Refuse by its name a field that is not honoured; `passed` are fields that the model takes."""
    rules = rules_of(api)
    for name, value in sent.items():
        rule = rules.get(name)
        if value is None or name in passed:
            continue
        if rule is None:
            raise bad_field(name, f"is no field of {api} that is known here; leave it out.")
        if rule.fate is Fate.REFUSED and not rule.excepts(value):
            raise bad_field(name, f"is not honoured here: {rule.why}.")


def find_hints(sent: Fields, api: Api, passed: Collection[str] = ()) -> list[str]:
    """Return the paths of the hints in a body that no policy has a setting for."""
    return [
        name
        for name, rule in rules_of(api).items()
        if rule.fate is Fate.HINT
        and name not in passed
        and not rule.excepts(reduce(lambda at, key: Fields(at).get(key), name.split("."), sent))
    ]


def find_function(api: Api, named: object, path: str) -> ToolFunction | None:
    """Return the function of a type of tools; None if the client does not run it."""
    row = TOOL_TYPES.get((api, named)) if isinstance(named, str) else None
    if row is None:
        problem = f"is of type {named!r}, which is not known here; send it as a function."
        raise bad_field(path, problem)
    if "refused" in row:
        raise bad_field(path, f"is of type {named!r}: {row['refused']}; leave it out.")
    return row.get("function")


def check_some_left(functions: Sequence[Tool], left_out: Sequence[str]) -> None:
    """Refuse tools if the client runs not one of them, since an agent then lives on the others."""
    if left_out and not functions:
        problem = (
            f"are all run by the API's own service ({', '.join(left_out)}), and nothing but the "
            "model runs here; send a function that the client runs."
        )
        raise bad_field("tools", problem)


def type_of(value: object) -> object:
    """Return the `type` that an object names, or the JSON type of another value."""
    return value.get("type") if isinstance(value, dict) else json_type(value)


def check_body(value: object) -> tuple[Fields, str]:
    """Return the fields of a body, which must be an object, and the model that it names."""
    if not isinstance(value, dict):
        raise bad_request(f"The body is {json_type(value)}; send a JSON object.")
    body = Fields(value)
    model = body.read("model", str)
    if not model:
        raise bad_request("There is no model; name one, any name will do.", "model")
    return body, model


def check_object(value: object, path: str, name: str) -> Fields:
    """Return the fields of an object of a list; `name` says what one is."""
    if not isinstance(value, dict):
        raise bad_field(path, f"is {json_type(value)}; {name} is an object.")
    return Fields(value, path)


def check_offered(
    mode: str, names: Sequence[str], tools: Sequence[Tool], where: str = "tool_choice"
) -> None:
    """Refuse a choice of a function that is not among `tools`, or a required call without tools.

    `where` is the path of the choice.
    """
    offered = [tool["function"]["name"] for tool in tools]
    if mode == "required" and not offered:
        raise bad_field(where, "asks for a call, and there are no tools; send some.")
    for name in names:
        if name not in offered:
            known = ", ".join(offered) or "none"
            raise bad_field(where, f"names {name!r}; the tools are: {known}.")


def read_text(content: object, path: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message's content, which may be an array of parts of these kinds."""
    return read_content(content, path, "", kinds)[1]


def read_thinking(sent: Fields) -> Thinking | None:
    """Read the setting of a chat template by which a model thinks or does not, as vLLM has it."""
    settings = sent.read_object("chat_template_kwargs")
    for name, value in settings.items():
        if name not in SWITCHES and value is not None:
            problem = f"is no setting that is known here; {' and '.join(SWITCHES)} are."
            raise bad_field(settings.path_of(name), problem)
    found = [(settings.read(name, bool), settings.path_of(name)) for name in SWITCHES]
    return next((Thinking(on, where) for on, where in found if on is not None), None)


def no_thinking(asked: bool, where: str) -> Thinking | None:
    """Return the hint not to think, if it is asked for; no policy has levels."""
    return Thinking(on=False, where=where, hint=True) if asked else None


def write_prompt_token_ids(completion: Completion) -> JsonObject:
    """Write the token ids of a prompt, if they were asked for."""
    asked = completion.request.fields.get(RETURN_TOKEN_IDS)
    return {"prompt_token_ids": list(completion.prompt_token_ids)} if asked else {}


def write_response_token_ids(completion: Completion) -> JsonObject:
    """Write the token ids of an answer, if they were asked for."""
    asked = completion.request.fields.get(RETURN_TOKEN_IDS)
    return {"token_ids": list(completion.response_token_ids)} if asked else {}


def write_token_ids(completion: Completion) -> JsonObject:
    """Write the token ids of a prompt and its answer, if they were asked for."""
    return write_prompt_token_ids(completion) | write_response_token_ids(completion)


def refuse_constant(name: str) -> None:
    """Refuse (ValueError) NaN and the infinities, which Python's parser of JSON accepts."""
    raise ValueError(f"{name} is not a JSON number")


DONE = "data: [DONE]\n\n"
"""The end of a stream of chat completions."""


def write_data(value: Mapping[str, object]) -> str:
    """Write one piece of a stream, in ASCII: some clients end a line at U+2028, as Python does."""
    return f"data: {json.dumps(value)}\n\n"


def write_named(value: Mapping[str, object]) -> str:
    """Write one piece of a stream, named by its type."""
    return f"event: {value['type']}\n{write_data(value)}"
