"""What every client says, and how its arguments choose its ways: NAME URL KEY NAME URL KEY …"""

import os
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
    """Run each way that an argument names, with the base URL and the key that follow the name."""
    named = {way.__name__: way for way in ways}
    arguments = iter(sys.argv[1:])
    for name, base_url, key in zip(arguments, arguments, arguments, strict=True):
        os.environ["OPENAI_API_KEY"] = key
        named[name](base_url)
