"""What every client says, and its ways, of which its arguments name some: NAME URL NAME URL …"""

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
    """Each way gets the base URL that was given for its name."""
    named = {way.__name__: way for way in ways}
    arguments = iter(sys.argv[1:])
    for name, base_url in zip(arguments, arguments, strict=True):
        named[name](base_url)
