"""Secrets by name, by shape and of the environment: no refusal, tracker or card shows them."""

import json
import os
import re
from collections.abc import Mapping

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
    r"|(?<=\b(?i:bearer) )\S+"
)
"""Keys of services, as they begin, and what follows `Bearer`."""
LONG_SECRET = 8
"""Letters from which on the value of a variable is looked for within other texts."""
LONGEST_QUOTE = 100
LONGEST_SAID = 300
HIDDEN = "***"


def public(config: Mapping[str, object]) -> dict[str, object]:
    """Copy the config without its secrets.

    A secret has a name like one, or holds what `redact` hides.
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
    secrets = (value for name, value in os.environ.items() if SECRET_VARIABLE.search(name))
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= LONG_SECRET:
            text = text.replace(secret, HIDDEN)
    return KNOWN_SHAPE.sub(HIDDEN, SECRET_OF_URL.sub(HIDDEN, text))


def cut(text: str) -> str:
    """Return the beginning of what a stranger says, without secrets: a cut one is not known."""
    return " ".join(redact(text).split())[:LONGEST_SAID]


def quote(value: object, name: str = "") -> str:
    """Quote a user's value in a refusal, in 100 letters at most; a secret is named, not quoted.

    None and truth values are written as YAML has them.
    """
    if is_secret(name):
        value = HIDDEN
    written = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    text = redact(written)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def _holds_secret(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_secret(item) for item in value)
    return isinstance(value, str) and redact(value) != value
