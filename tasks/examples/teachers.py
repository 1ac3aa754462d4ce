"""examples → their teachers: which one an example names, and what it reads beside the policy.

The text of `reads` may have columns of the example, as `$column` or `${column}`; `$$` is a dollar.
"""

import json
from collections.abc import Container, Mapping, Sequence
from string import Template
from typing import Any

from ratchet.tasks.examples.reading import DatasetError

SYSTEM_ROLE = "system"


class _Text(Template):
    """A text with columns; in braces, a column has any name."""

    braceidpattern = r"[^{}]+"


def choose_teacher(example: Mapping[str, Any], by: str, teachers: Container[str]) -> str:
    """Return the teacher that an example names; DatasetError if no teacher has that name."""
    if (name := str(example.get(by))) in teachers:
        return name
    raise DatasetError(
        f"an example names the teacher {name} by its column {by} ({str(example)[:80]}), and "
        "algorithm.teacher.models has none of that name; give one, as NAME=MODEL, or mend the "
        "column"
    )


def check_reads(text: str) -> None:
    """Refuse (ValueError) a text that is blank, or has a dollar that begins no column."""
    if not text.strip():
        raise ValueError("reads is blank; give a text, or leave it out")
    if not _Text(text).is_valid():
        raise ValueError(
            f"reads {text!r} has a $ that no column follows; write $column, or $$ for a dollar"
        )


def fill_reads(text: str, example: Mapping[str, Any]) -> str:
    """Return the text with the columns of an example; DatasetError if the example lacks one."""
    values: dict[str, str] = {}
    for column in _Text(text).get_identifiers():
        value = example.get(column)
        if value is None:
            raise DatasetError(
                f"an example has no {column}, which its teacher reads (found: "
                f"{', '.join(example)}); mend teacher.reads, or the data set"
            )
        values[column] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _Text(text).substitute(values)


def read_before(text: str, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Put a text before a conversation, as its system message.

    If the conversation begins with a system message, the text becomes the beginning of that
    message: templates take one system message, and most of them only as the first message.
    """
    if messages and messages[0]["role"] == SYSTEM_ROLE:
        first, *rest = messages
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": SYSTEM_ROLE, "content": text}, *messages]
