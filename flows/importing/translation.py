"""A translation into a recipe while it is made: its values, their reasons, and what is refused."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from adapters.errors import UserError
from tasks.storage.keys import Json, merge, nest


class ImportRefusal(UserError):
    """Refusal of a file that no recipe says."""


@dataclass
class Translation:
    """Values of a recipe, by `section.key`, each with its reason.

    A problem is settled if the user gives one of its keys; `left_out` maps a key of the file
    without a counterpart to what it would have done.
    """

    chosen: frozenset[str]
    values: dict[str, tuple[Json, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def give(self, key: str, value: Json, reason: str) -> None:
        """Set a key of the recipe."""
        self.values[key] = value, reason

    def forget(self, section: str) -> None:
        """Forget the values of a section, in whose place the user gives others."""
        self.values = {
            key: value for key, value in self.values.items() if key.split(".")[0] != section
        }

    def refuse(self, said: str, settled_by: Iterable[str] = ()) -> None:
        """Note what no recipe says, unless the user gives a key in its place."""
        keys = list(settled_by)
        if not self.chosen.intersection(keys):
            remedy = "".join(f"; give --set {key}=…" for key in keys[:1])
            self.problems.append(said + remedy)

    def finish(self, name: str) -> None:
        """Raise an ImportRefusal of all problems, if there are any."""
        if self.problems:
            raise ImportRefusal(f"{name} cannot be imported: {'; and '.join(self.problems)}")

    def nested(self) -> dict[str, Json]:
        """Return the values in sections, as a recipe has them."""
        sections: dict[str, Json] = {}
        for key, (value, _) in self.values.items():
            sections = merge(sections, nest(key, value))
        return sections
