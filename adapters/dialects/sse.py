"""Server-sent lines, the form in which an answer is streamed."""

import json
from typing import Any

DONE = "data: [DONE]\n\n"
"""What ends a stream of chat completions."""


def data(value: Any) -> str:
    """One piece of a stream, in ASCII: several clients end a line at U+2028, as Python does."""
    return f"data: {json.dumps(value)}\n\n"


def named(value: dict[str, Any]) -> str:
    """One piece that clients tell from others by its type."""
    return f"event: {value['type']}\n{data(value)}"
