"""The place of a rollout: a folder with a working folder, a HOME and a TMPDIR of its own.

A caged program finds the same three folders below CAGED, in each rollout alike.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ratchet.adapters.calls import Example
from ratchet.adapters.clients.current_rollout import Endpoint, Roles, role_variables
from ratchet.adapters.player_protocol import PlaceSettings, Record
from ratchet.adapters.process.program import CommandFailed, program_environment

WORK, HOME, TEMPORARY, SCORE, REPORTS = "work", "home", "tmp", "score", "report"
CAGED = Path("/place")
"""The folder of a place as a caged program sees it."""

CAGED_PORT = 8600
CAGED_DOOR = f"http://127.0.0.1:{CAGED_PORT}"
"""The door as a caged program sees it."""

TESTS = "tests"
"""Column with files that only the reward command sees."""

PROGRAM_LOG = "program.log"
"""File of a kept place with the end of what the agent's program said."""

PROJECT = "PROJECT"
NAMED = re.compile(r"\$\{([^{}]*)\}")
COLUMN = "example."


class PlaceError(CommandFailed):
    """An error for a place that cannot be filled, or that its program has filled too far."""


@dataclass(frozen=True)
class Place(Record):
    """Place of one rollout, and its example."""

    settings: PlaceSettings
    rollout_id: str
    example: Example

    @property
    def folder(self) -> Path:
        return Path(self.settings.folder) / self.rollout_id

    @property
    def work(self) -> Path:
        return self.folder / WORK

    @property
    def home(self) -> Path:
        return self.folder / HOME

    @property
    def temporary(self) -> Path:
        return self.folder / TEMPORARY

    @property
    def scored(self) -> Path:
        """The folder of the reward command, which is made once the agent's program has ended."""
        return self.folder / SCORE

    @property
    def report(self) -> Path:
        """The report of the reward command, in a folder that holds nothing else."""
        return self.folder / REPORTS / "report.xml"

    @property
    def given(self) -> Example:
        """The example as the agent gets it: without what only the reward command sees."""
        hidden = {TESTS} if self.settings.reward else set[str]()
        return {name: value for name, value in self.example.items() if name not in hidden}

    def seen(self, path: Path) -> str:
        """Return a path of the place as its program sees it."""
        return str(CAGED / path.relative_to(self.folder) if self.settings.caged else path)

    def own_variables(self) -> dict[str, str]:
        """Return the environment of any program in the place."""
        own = {"HOME": self.seen(self.home), "TMPDIR": self.seen(self.temporary)}
        return {**program_environment(), **own, "PWD": self.seen(self.work)}

    def variables(self, roles: Roles) -> dict[str, str]:
        """Return the environment of the agent's program: also the roles', and the recipe's."""
        if self.settings.caged:  # the program reaches the door by another address
            paths = {role: urlsplit(one["base_url"]).path for role, one in roles.items()}
            roles = {
                role: Endpoint({**one, "base_url": f"{CAGED_DOOR}{paths[role]}"})
                for role, one in roles.items()
            }
        known = self.own_variables() | role_variables(roles)
        given = self.settings.variables.items()
        return known | {name: self.fill_in(value, known, name) for name, value in given}

    def log(self, said: str) -> None:
        """Keep what the agent's program said, beside what it made."""
        (self.folder / PROGRAM_LOG).write_text(said, encoding="utf-8")

    def fill_in(self, text: str, variables: Mapping[str, str], where: str) -> str:
        """Put the value of a variable, or of a column of the example, for each `${NAME}`.

        `${PROJECT}` is the folder in which Ratchet runs. PlaceError for any other name; `where`
        then says where it stands.
        """

        def value_of(found: re.Match[str]) -> str:
            name = found[1]
            column = name.removeprefix(COLUMN)
            if name != column and column in self.given:
                value = self.given[column]
                return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if name == PROJECT:
                return str(Path.cwd())
            if name in variables:
                return variables[name]
            columns = [COLUMN + column for column in self.given]
            raise PlaceError(
                f"{where} has ${{{name}}}, which is no variable of the program and no column of "
                f"the example; the columns are: {', '.join(columns)}"
            )

        return NAMED.sub(value_of, text)


def names_column(text: str) -> bool:
    return any(name.startswith(COLUMN) for name in NAMED.findall(text))
