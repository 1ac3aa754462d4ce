"""A role of a recipe whose calls are known by what they say."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Discriminator, Tag

from ratchet.adapters.calls import PATHS
from ratchet.adapters.door.roles import CallsOf
from ratchet.tasks.settings.section import Refusals, Section


class SentCalls(Section):
    """Marks of a role's calls among those at the base URL of the policy.

    All that are given must fit. `*` stands for any text, `?` for any character.
    """

    model: str | None = None
    """Name of the model that is asked for."""

    system: str | None = None
    """First words of the system message."""

    path: str | None = None
    """API: /chat/completions, /responses, /messages or /models (Google's)."""

    def refusals(self) -> Refusals:
        given = {"model": self.model, "system": self.system, "path": self.path}
        empty = [name for name, value in given.items() if value is not None and not value.strip()]
        yield (
            not any(given.values()),
            f"{', '.join(empty) or 'nothing'} is said of the calls; give model, system or path",
        )
        yield bool(empty), f"{', '.join(empty)} is empty, which fits all; leave it out"
        yield (
            self.path is not None and self.path not in PATHS,
            f"path {self.path!r} is of no API; give {' or '.join(PATHS)}",
        )


class AskedRole(Section):
    """Role whose calls have marks, and who answers it."""

    who: str
    """Who answers the role."""

    when: SentCalls
    """What its calls say."""

    def calls(self, role: str) -> CallsOf:
        """Return what the calls of the role say."""
        return CallsOf(role, self.when.model, self.when.system, self.when.path)


def _kind(given: object) -> str | None:
    """Tell a name from a table, so that a mistake is said of the one that is given."""
    if isinstance(given, Mapping | AskedRole):
        return "asked"
    return "name" if isinstance(given, str) else None


Answerer = Annotated[
    Annotated[str, Tag("name")] | Annotated[AskedRole, Tag("asked")],
    Discriminator(
        _kind,
        custom_error_type="answerer",
        custom_error_message="a role has a name of who answers it, or a table of who and when",
    ),
]
"""Who answers a role, by a name or together with what its calls say."""
