"""A row's columns → the messages of a conversation, in the forms that data sets are published in.

The form of a row is told by its columns. A message is read by `adapters.rendering.messages`, so
that a row says what the same messages would say to the door.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from adapters.calls import Message, Refused, Tool
from adapters.rendering.messages import json_type, parse_text, read_message, read_tool
from tasks.examples.reading import DatasetError, Example, Source, is_padded

SHAREGPT = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""Roles of ShareGPT's conversations, and those of chat completions that they are."""

COLUMNS = ("messages", "conversations")
"""Columns that hold a whole conversation."""


@dataclass(frozen=True)
class Form:
    """Columns of a question, of what stands beside it, of a text before it, and of its answer."""

    question: str
    answer: str
    beside: str | None = None
    before: str = "system"


FORMS = (
    Form("prompt", "completion"),
    Form("prompt", "response"),
    Form("instruction", "output", "input"),
    Form("instruction", "response", "context"),
    Form("question", "answer"),
    Form("question", "response", before="system_prompt"),
)
"""Forms without messages, as those of alpaca, dolly, GSM8K and OpenOrca."""

KNOWN = "messages; conversations; " + "; ".join(
    f"{form.question} and {form.answer}" for form in FORMS
)


@dataclass(frozen=True)
class Said:
    """A message of a row, and how it is trained: by its `weight` if it is `trainable`."""

    message: Message
    trainable: bool | None = None
    weight: float = 1.0


def read_unpadded(source: Source) -> Iterator[Example]:
    """Yield the rows of a source as they were before their file padded them.

    Parquet has no absent keys, so that a null in an object is taken for one. In JSON, of JSON lines
    or of a text in a column, a null is a value. DatasetError if the rows do not all name roles as
    the first does.
    """
    padded, known = is_padded(source.dataset), None
    for row in source.examples():
        example = row["example"]
        if padded:
            example = {name: drop_nulls(value) for name, value in example.items()}
        spoken = speaks(example)
        if known is not None and spoken not in (None, known):
            raise DatasetError(
                f"row {row['example_id']} of {source.dataset} has the roles of {spoken}, and "
                f"earlier rows those of {known}; give all rows the same roles"
            )
        known = known or spoken
        yield {**row, "example": example}


def read_conversation(row: Mapping[str, Any]) -> list[Said] | None:
    """Read the messages of a row; None if it has none of KNOWN. DatasetError says what is wrong."""
    for column in COLUMNS:
        if row.get(column) is not None:
            return read_messages(row[column], column)
    for form in FORMS:
        if row.get(form.question) is not None and row.get(form.answer) is not None:
            return _read_form(row, form)
    return None


def read_messages(value: object, name: str, role: str | None = None) -> list[Said]:
    """Read the messages that a column has or, with a `role`, the text of one."""
    parsed = parse_text(value)
    given = cast(list[object], parsed) if isinstance(parsed, list) else []
    if role is not None and isinstance(value, str):
        if not given or not all(isinstance(one, Mapping) and "role" in one for one in given):
            return [Said({"role": role, "content": value})]
    elif not given:
        raise DatasetError(f"its {name} is {value!r:.80}; give a list of messages")
    messages = _as_chat(given)
    return [_read_said(one, f"{name}[{at}]") for at, one in enumerate(messages)]


def read_tools(value: object) -> list[Tool]:
    """Read the tools of a row, as a list or as JSON."""
    if (value := parse_text(value)) is None:
        return []
    if not isinstance(value, list):
        raise DatasetError(f"its tools are {value!r:.80}; give a list of tools")
    try:
        return [read_tool(parse_text(one), f"tools[{at}]") for at, one in enumerate(value)]
    except Refused as refused:
        raise DatasetError(refused.message) from refused


def drop_padding(said: Sequence[Said], tools: Sequence[Tool]) -> list[Said]:
    """Leave out the null arguments of calls that the called tool does not declare.

    Arrow gives every object of a column the keys of all others. An argument that a tool declares
    may be null, as JSON lines have it.
    """
    declared = {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {}
        for tool in tools
    }
    return [replace(one, message=_drop_undeclared(one.message, declared)) for one in said]


def drop_nulls(value: Any) -> Any:
    """Leave out the keys of objects whose value is null, as columns of Parquet have them."""
    if isinstance(value, list):
        return [drop_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: drop_nulls(one) for key, one in value.items() if one is not None}
    return value


def speaks(row: Mapping[str, Any]) -> str | None:
    """Return whose roles a row has, ShareGPT's or those of chat completions; None of no roles."""
    value = next((row[name] for name in COLUMNS if row.get(name) is not None), None)
    roles = _roles(parse_text(value))
    return None if not roles else "ShareGPT" if _is_sharegpt(roles) else "chat completions"


def join_repeated(prompt: Sequence[Said], side: Sequence[Said]) -> tuple[list[Said], list[Said]]:
    """Return a prompt and what follows it, where the prompt's end may be repeated.

    The repeated messages stand once. If a side begins with more than the prompt, such as a system
    message, its beginning is the prompt.
    """
    asked, said = [one.message for one in prompt], [one.message for one in side]
    lead = next((at for at, one in enumerate(said) if one["role"] == "assistant"), len(said))
    if len(asked) < lead and said[lead - len(asked) : lead] == asked:
        return [*side[:lead]], [*side[lead:]]
    longest = range(min(len(asked), len(said)), 0, -1)
    alike = next((count for count in longest if asked[-count:] == said[:count]), 0)
    return [*prompt], [*side[alike:]]


def _read_form(row: Mapping[str, Any], form: Form) -> list[Said]:
    asked = read_messages(row[form.question], form.question, "user")
    if form.beside is not None and row.get(form.beside):
        (question,), further = asked, _text(row[form.beside], form.beside)
        content = f"{question.message['content']}\n\n{further}"
        asked = [Said({**question.message, "content": content})]
    if row.get(form.before):
        asked = [Said({"role": "system", "content": _text(row[form.before], form.before)}), *asked]
    prompt, answer = join_repeated(asked, read_messages(row[form.answer], form.answer, "assistant"))
    return [*prompt, *answer]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"its {name} is {json_type(value)}; give a text")
    return value


def _read_said(value: object, path: str) -> Said:
    try:
        read = read_message(value, path)
    except Refused as refused:
        raise DatasetError(refused.message) from refused
    sent = cast(Mapping[str, Any], value)
    weight = 1 if sent.get("weight") is None else sent["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e6:
        raise DatasetError(f"{path} has the weight {weight!r:.60}; give a number from 0 on")
    trainable = sent.get("trainable")
    return Said(read, None if trainable is None else trainable is True, float(weight))


def _as_chat(messages: Sequence[object]) -> list[object]:
    """Return messages with the roles of chat completions, if all of them speak as ShareGPT does."""
    if not _is_sharegpt(_roles(messages)):
        return [*messages]
    sent = [cast(Mapping[str, Any], one) for one in messages]
    return [
        {**one, "role": SHAREGPT[_role(one)], "content": one.get("content", one.get("value"))}
        for one in sent
    ]


def _roles(messages: object) -> set[str]:
    """Return the roles of messages, by the key of chat completions or by ShareGPT's."""
    given = cast(list[object], messages) if isinstance(messages, list) else []
    return {_role(one) for one in given}


def _role(message: object) -> str:
    sent = cast(Mapping[str, Any], message) if isinstance(message, Mapping) else {}
    return str(sent.get("role") or sent.get("from"))


def _is_sharegpt(roles: set[str]) -> bool:
    return bool(roles & {"human", "gpt"}) and roles <= {*SHAREGPT}


def _drop_undeclared(message: Message, declared: Mapping[str, Any]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    kept = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, dict) and name in declared:
            arguments = {
                key: value
                for key, value in arguments.items()
                if value is not None or key in declared[name]
            }
        kept.append({**call, "function": {"name": name, "arguments": arguments}})
    return cast(Message, {**message, "tool_calls": kept})
