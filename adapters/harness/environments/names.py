"""Names of environments, such as game:Hangman-v0-easy?hardcore=true."""

import json
from urllib.parse import parse_qsl

from adapters.calls import JsonObject
from adapters.errors import UserError


class NoEnvironment(UserError):
    """An error for an environment that cannot be played."""


def split_name(name: str) -> tuple[str, JsonObject]:
    """Split a name at its question mark into the id and the arguments: each value JSON or text."""
    identity, _, query = name.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    return identity, {key: _parse(text) for key, text in pairs}


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
