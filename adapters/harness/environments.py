"""The name of an environment, such as game:Hangman-v0-easy?hardcore=true → its id and arguments."""

import json
from typing import Any
from urllib.parse import parse_qsl

from adapters.errors import UserError


class NoEnvironment(UserError):
    """An environment cannot be played."""


def identity_and_arguments(name: str) -> tuple[str, dict[str, Any]]:
    """What stands before the question mark, and what after it: each value JSON, or else text."""
    identity, _, query = name.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    return identity, {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
