"""A translation into a recipe while it is made: its values, their reasons, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flows.importing.trinity_file import ImportRefusal, TrinityFile
from tasks.storage.keys import Json, Section


@dataclass
class Translation:
    """Values of a recipe, by `section.key`, each with its reason.

    `chosen` are the values that the user gives in place of those of the file. A problem is settled
    if the user gives one of its keys; `left_out` maps a key of the file without a counterpart to
    what it would have done.
    """

    file: TrinityFile
    chosen: Section
    values: dict[str, tuple[Json, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def give(self, key: str, value: Json, reason: str) -> None:
        """Set a key of the recipe."""
        self.values[key] = value, reason

    def copy(
        self, ours: str, theirs: str, kind: Callable[[float], Json] | None = None, note: str = ""
    ) -> None:
        """Set a key of the recipe to the value of one of the file: any, or a `kind` of number."""
        value = self.file.get(theirs) if kind is None else kind(self.file.number(theirs))
        self.give(ours, value, self.file.reason(theirs) + note)

    def refuse(self, said: str, *settled_by: str) -> None:
        """Note what no recipe says, unless the user gives one of the keys in its place."""
        if not self.chosen.keys() & {*settled_by}:
            remedy = f"; give --set {settled_by[0]}=…" if settled_by else ""
            self.problems.append(said + remedy)

    def check(self, name: str) -> None:
        """Raise an ImportRefusal of all problems, if there are any."""
        if self.problems:
            raise ImportRefusal(f"{name} cannot be imported: {'; and '.join(self.problems)}")
