"""Server-sent lines, the form of a streamed answer."""

import json
from collections.abc import Mapping

DONE = "data: [DONE]\n\n"
"""The end of a stream of chat completions."""


def write_data(value: Mapping[str, object]) -> str:
    """Write one piece of a stream, in ASCII: some clients end a line at U+2028, as Python does."""
    return f"data: {json.dumps(value)}\n\n"


def write_named(value: Mapping[str, object]) -> str:
    """Write one piece of a stream under the name that is its type."""
    return f"event: {value['type']}\n{write_data(value)}"
