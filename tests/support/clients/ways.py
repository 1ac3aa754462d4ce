"""What every client says, and how its arguments choose its ways: NAME URL NAME URL …"""

import sys
from collections.abc import Callable
from typing import Any

Way = Callable[[str], None]

QUESTIONS = ("Who are you?", "What is 2 + 3?", "Say it again.")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at something.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def run(*ways: Way) -> None:
    """Run each way that an argument names, with the base URL that follows the name."""
    named = {way.__name__: way for way in ways}
    arguments = iter(sys.argv[1:])
    for name, base_url in zip(arguments, arguments, strict=True):
        named[name](base_url)
