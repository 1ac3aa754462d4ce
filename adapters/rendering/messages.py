"""Messages as clients and data sets have them, read into messages that renderers take.

What would be lost or read as something else is refused by its path: content that is no text, parts
that are no text, roles and keys that no format has.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ratchet.adapters.calls import JsonObject, Message, Refused, Tool, ToolCall

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""Types of a part of a content that are read; the text of a part has the key of its own or text."""

OF_PART = {"refusal": "refusal", "thinking": "thinking"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys by which an answer has its reasoning."""
THOUGHTS = ("reasoning_details", "thinking_blocks")
"""Keys by which clients repeat an answer's reasoning in pieces."""
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
"""Keys by which some clients send what is not text beside the content."""
ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Keys by which some clients give a call's arguments; they are read by the first."""

CALLED = "functions."
"""Beginning of an id that names its call, as Kimi's models write them."""

JSON_TYPES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
VALUES = ("default", "const", "enum", "examples")
"""Keys of a schema that have values, in which null is one."""
MAY_BE_NULL = ("default", "const")
"""Keys of VALUES that have one value, not a list."""


def bad_message(path: str, problem: str) -> Refused:
    """Return the refusal of what stands at a path; the message is the path and the problem."""
    return Refused(400, f"{path} {problem}", param=path)


def read_message(value: object, path: str, roles: Sequence[str] = MESSAGE_ROLES) -> Message:
    """Read a message with a role and its content, as text or as parts; Refused by its path."""
    if not isinstance(value, Mapping):
        raise bad_message(path, f"is {json_type(value)}; a message is an object.")
    sent = cast(Mapping[str, Any], value)
    role = sent.get("role")
    if not isinstance(role, str) or role not in roles:
        raise bad_message(f"{path}.role", f"is {role!r:.60}; it is one of {', '.join(roles)}.")
    content = _content(sent, role)
    thoughts, said = read_content(content, f"{path}.content", role)
    read: Message = {"role": "system" if role == "developer" else role, "content": said}
    for name in ("name", "tool_call_id"):
        if isinstance(sent.get(name), str):
            read[name] = sent[name]
    if thought := _reasoning(sent, thoughts, path, role):
        read["reasoning_content"] = thought
    if calls := _calls(sent, path, role):
        read["tool_calls"] = calls
    _check_lost(sent, path, "reasoning_content" in read)
    return read


def read_content(
    content: object, path: str, role: str, kinds: Sequence[str] = TEXT_PARTS
) -> tuple[list[str], str]:
    """Read a content, or its parts of these kinds: the reasoning in it, and its text."""
    if isinstance(content, str):
        return [], content
    if not isinstance(content, list):
        problem = f"is {json_type(content)}; it must be text or an array of parts."
        raise bad_message(path, problem)
    thoughts: list[str] = []
    said: list[str] = []
    for index, part in enumerate(content):
        kind, text = _read_part(part, f"{path}[{index}]", kinds)
        if kind != "thinking":
            said.append(text)
        elif role == "assistant":
            thoughts.append(text)
        else:
            raise bad_message(f"{path}[{index}]", f"is thinking of the role {role}.")
    return thoughts, "".join(said)


def read_call(value: object, path: str) -> ToolCall:
    """Read a tool call, whose arguments are JSON, or an object; no arguments are `{}`."""
    sent = cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
    function = sent.get("function") or sent
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, str | dict | None):
        raise bad_message(path, "has no function with a name and arguments.")
    given = [key for key in ARGUMENTS if {**function, **sent}.get(key) is not None]
    if arguments is None and given:
        problem = f"has {given[0]}, which is not read; give it as the function's arguments."
        raise bad_message(path, problem)
    return create_tool_call(name, arguments, sent.get("id"))


def create_tool_call(name: str, arguments: str | JsonObject | None, call_id: object) -> ToolCall:
    """Return a tool call as chat completions have it; an id that is not a string is left out."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    call: ToolCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if isinstance(call_id, str) else call


def name_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have ids with their name and number, as Kimi's models do."""
    ids: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            given = call.get("id", "")
            known = given.startswith(CALLED)
            own = given if known else f"{CALLED}{call['function']['name']}:{len(ids)}"
            ids[given or own] = own
            calls.append({**call, "id": own})
        answered = message.get("tool_call_id")
        changed: dict[str, object] = {"tool_calls": calls} if calls else {}
        if answered in ids:
            changed["tool_call_id"] = ids[answered]
        named.append(cast(Message, {**message, **changed}))
    return named


def read_tool(value: object, path: str) -> Tool:
    """Read a tool, without the nulls that no schema has."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_message(path, 'is not {"type": "function", "function": {"name": …}}.')
    return cast(Tool, without_padding(value))


def without_padding(value: object, by_name: bool = False) -> Any:
    """Return a schema without its nulls, except nulls that are values.

    Arrow and pandas give each object of a column the keys of all others, as nulls.
    """
    if isinstance(value, list):
        return [without_padding(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for key, inner in cast(Mapping[str, Any], value).items():
        is_value = key in VALUES and not by_name
        if is_value and (inner is not None or key in MAY_BE_NULL):
            kept[key] = inner
        elif inner is not None:
            kept[key] = without_padding(inner, key in SCHEMAS_BY_NAME and not by_name)
    return kept


def json_type(value: object) -> str:
    """Name the JSON type of a value, with its article."""
    return JSON_TYPES.get(type(value), type(value).__name__)


def parse_text(value: object) -> Any:
    """Return what a text of JSON says; a text of no JSON, and any other value, stays as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def check_json(value: object, deepest: int) -> None:
    """Refuse (ValueError, RecursionError) NaN, half a surrogate pair, and deeper levels."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    level = [value]
    for _ in range(deepest + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return
        level = [one for of in level for one in (of.values() if isinstance(of, dict) else of)]
    raise ValueError(f"it is nested more than {deepest} levels deep")


def _content(sent: Mapping[str, Any], role: str) -> object:
    """Return the content; none of an answer or a result is empty, or an answer's refusal."""
    content = sent.get("content")
    if role == "assistant" and not content and isinstance(sent.get("refusal"), str):
        return sent["refusal"]
    return "" if content is None and role in ("assistant", "tool") else content


def _read_part(part: object, path: str, kinds: Sequence[str]) -> tuple[str, str]:
    sent = cast(Mapping[str, Any], part) if isinstance(part, Mapping) else {}
    kind = sent.get("type") if isinstance(part, Mapping) else json_type(part)
    text = sent.get(OF_PART.get(str(kind), "text"))
    if not isinstance(kind, str) or kind not in kinds or not isinstance(text, str):
        raise bad_message(path, f"is a part of type {kind!r:.60}; only text is read here.")
    return kind, text


def _reasoning(
    sent: Mapping[str, Any], thoughts: Sequence[str], path: str, role: str
) -> str | None:
    """Return the reasoning of a message, which has it by one of REASONING_KEYS or in its parts."""
    given = ["".join(thoughts)] if thoughts else []
    for key in REASONING_KEYS:
        value = sent.get(key)
        if value is not None and not isinstance(value, str):
            raise bad_message(f"{path}.{key}", f"is {json_type(value)}; it must be a string.")
        given += [value] if value else []
    if len({*given}) > 1:
        raise bad_message(
            path, f"has reasoning twice, as {' and '.join(REASONING_KEYS)} or in parts."
        )
    if given and role != "assistant":
        raise bad_message(path, f"has reasoning, and its role is {role}.")
    return given[0] if given else None


def _check_lost(sent: Mapping[str, Any], path: str, thinks: bool) -> None:
    """Refuse a message with what is not read beside its content."""
    if shown := [key for key in MEDIA_KEYS if sent.get(key)]:
        raise bad_message(
            f"{path}.{shown[0]}", "is not read; leave it out, only text is read here."
        )
    if thoughts := [key for key in THOUGHTS if sent.get(key) and not thinks]:
        raise bad_message(f"{path}.{thoughts[0]}", f"is not read; give it as {REASONING_KEYS[0]}.")


def _calls(sent: Mapping[str, Any], path: str, role: str) -> list[ToolCall]:
    if sent.get("function_call"):
        raise bad_message(f"{path}.function_call", "is the old form of tool_calls; give these.")
    calls = parse_text(sent.get("tool_calls")) or []
    if not isinstance(calls, list):
        raise bad_message(f"{path}.tool_calls", f"is {json_type(calls)}; it must be an array.")
    if calls and role != "assistant":
        raise bad_message(f"{path}.tool_calls", f"are of the role {role}; an assistant calls.")
    return [read_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(calls)]


def normalize(message: Message) -> list[object]:
    """Return the same value for all ways in which clients write the same message.

    Clients strip answers, write tool arguments and JSON answers anew and choose their own call ids;
    the meaning stays the same. Messages that are not the model's must be equal to the letter.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.strip()
        content = _normalize_json(content) if content.startswith(("{", "[")) else content
    calls = [
        [call["function"]["name"], _normalize_json(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], content, calls]


def _normalize_json(written: str | JsonObject) -> str:
    """Return one spelling of a JSON value; a text that is not JSON is only stripped."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
        return canonical_json(value).decode()
    except (ValueError, RecursionError):  # not JSON, or too long a number or too deep for Python
        return str(written).strip()


def canonical_json(value: object) -> bytes:
    """Write a JSON value in the form that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
