"""Secrets by name, by shape and of the environment: no refusal, tracker or card shows them."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

SECRET_NAME = re.compile(
    r"(api[-_]?keys?|secrets?|password|passwd|authorization|credentials?|token)$", re.I
)
SECRET_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|AUTH_STRING)$", re.I)
SECRET_OF_URL = re.compile(
    r"(?<=://)[^/@\s]*:[^/@\s]+(?=@)"
    r"|(?<=[?&])(?:[\w-]*(?:key|token|secret|password|signature)|sig)=[^&\s'\"]+",
    re.I,
)
"""A password of a URL, and a URL's parameter that is named like a secret."""
KNOWN_SHAPE = re.compile(
    r"\b(?:(?:sk|tml|glpat|nvapi|xox[abprs])-[A-Za-z0-9_-]{16,}"
    r"|(?:hf|gh[opsu]|github_pat|gsk|wandb_v1)_[A-Za-z0-9_]{16,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,})"
    r"|(?<=\bBearer )\S+"
)
"""Keys of services, as they begin, and what follows `Bearer`."""
RANDOM_LETTERS = re.compile(r"(?<![A-Za-z0-9])(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[A-Za-z0-9]{24,}")
"""Letters and digits in one word, longer than names are."""
LONG_SECRET = 8
"""Letters from which on the value of a variable is looked for within other texts."""
LONGEST_QUOTE = 100
MOST_ENTRIES = 30
HIDDEN = "***"


def public(config: Mapping[str, object]) -> dict[str, object]:
    """Copy the config without its secrets.

    A secret has a name like one, is a URL with a password, or holds the value of a variable of the
    environment with such a name.
    """
    return {
        name: public(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not is_secret(name) and not _holds_secret(value)
    }


def is_secret(name: str) -> bool:
    """Return whether a key, or the last part of one, is named like a secret."""
    return SECRET_NAME.search(name.rpartition(".")[2]) is not None


def redact(text: str) -> str:
    """Hide in a text the secrets of the environment, passwords of URLs and keys of services."""
    for secret in sorted(_secrets_of_environment(), key=len, reverse=True):
        if len(secret) >= LONG_SECRET:
            text = text.replace(secret, HIDDEN)
    return KNOWN_SHAPE.sub(HIDDEN, SECRET_OF_URL.sub(HIDDEN, text))


def hide(text: str, value: object, name: str = "") -> str:
    """Hide in a text the secrets of a user's value, as they are and as Python quotes them.

    A secret stands under the name of one, is one of the environment, or looks like a key.
    """
    environment = {*_secrets_of_environment()}
    for of, leaf in _leaves(value, name):
        for secret in _secrets_in(leaf, of, environment):
            for form in filter(None, (secret, repr(secret)[1:-1])):
                if form in text:
                    whole = rf"(?<![A-Za-z0-9]){re.escape(form)}(?![A-Za-z0-9])"
                    text = re.sub(whole, HIDDEN, text)
    return text


def quote(value: object, name: str = "") -> str:
    """Quote a user's value in a refusal, without its secrets, and in 100 letters at most.

    None and truth values are written as YAML has them.
    """
    first = _first_entries(value)
    written = json.dumps(first) if first is None or isinstance(first, bool) else repr(first)
    text = hide(redact(written), first, name)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Iterate over the keys and values in a value, each with its name or a secret's around it."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield "", key
            yield from _leaves(entry, name if is_secret(name) else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for entry in value:
            yield from _leaves(entry, name)
    else:
        yield name, value


def _secrets_in(leaf: object, name: str, environment: Collection[str]) -> list[str]:
    if is_secret(name):
        return [str(leaf)]
    if not isinstance(leaf, str):
        return []
    return [leaf] if leaf in environment else RANDOM_LETTERS.findall(leaf)


def _first_entries(value: object) -> object:
    """Copy a value with the first entries of each list and mapping alone."""
    if isinstance(value, Mapping):
        return {key: _first_entries(value[key]) for key in islice(value, MOST_ENTRIES)}
    if isinstance(value, list | tuple):
        return [_first_entries(entry) for entry in value[:MOST_ENTRIES]]
    return value


def _secrets_of_environment() -> list[str]:
    return [text for name, text in os.environ.items() if SECRET_VARIABLE.search(name) and text]


def _holds_secret(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_secret(item) for item in value)
    if not isinstance(value, str):
        return False
    held = (
        text == value or (len(text) >= LONG_SECRET and text in value)
        for text in _secrets_of_environment()
    )
    return any(held) or SECRET_OF_URL.search(value) is not None
