"""The base of all errors that are shown to a user in one line, and the words of their remedies."""

import difflib
from collections.abc import Iterable, Sequence

from ratchet.adapters.redaction import redact


class UserError(Exception):
    """An error that its user can mend: its text states the fact, the value and the remedy.

    A text shows no secret of the environment, no password of a URL and no key of a service.
    """

    status = 2
    """Exit status of a command that it ends."""

    def __init__(self, said: str) -> None:
        super().__init__(redact(said))


class PassingError(UserError):
    """An error that may pass: the same work may succeed later, with nothing changed."""


class ServiceError(UserError):
    """An error of the Tinker service that its user can mend."""


class EngineDied(ServiceError):
    """The end of the engine's process while it was needed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question after the known name that is nearest to another; empty if none is near."""
    return _ask_after(difflib.get_close_matches(name, [*known], n=1))


def did_you_mean_key(key: str, known: Iterable[str]) -> str:
    """Return a question after the known `section.key` that is nearest to another, if one is near.

    A key of the same section comes first, which may be shortened: `lr` is `learning_rate`. Then
    comes a key of the same name in another section.
    """
    keys = [*known]
    section, _, name = key.rpartition(".")
    own = {last: one for one in keys for of, _, last in [one.rpartition(".")] if of == section}
    short = [last for last in own if _is_short_for(name, last)]
    if near := short or difflib.get_close_matches(name, own, n=1):
        return _ask_after([own[near[0]]])
    namesakes = [one for one in keys if one.rpartition(".")[2] == name]
    others = namesakes or ([] if section and own else keys)
    return _ask_after(difflib.get_close_matches(key, others, n=1, cutoff=0 if namesakes else 0.6))


def _is_short_for(short: str, name: str) -> bool:
    """Return whether a word is the beginning, the initials or a part of a name of several words."""
    words = name.split("_")
    initials = "".join(word[:1] for word in words)
    return name.startswith(short) or short in (initials, *words)


def _ask_after(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int = 10) -> str:
    """List the first `most` names, and count the others."""
    said = [*map(str, names)]
    more = f" and {len(said) - most:,} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more
