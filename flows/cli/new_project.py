"""The project that `ratchet init` writes, by the kind of its agent: folders of `template/`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from string import Template
from textwrap import indent
from typing import Annotated

import typer

from ratchet.adapters.errors import UserError, did_you_mean
from ratchet.adapters.process.terminal import show, write_data
from ratchet.adapters.project.modules import EXAMPLES
from ratchet.adapters.yaml_text import read_yaml, write_yaml
from ratchet.tasks.storage.dotted_keys import Json, Section, merge_values
from ratchet.tasks.storage.files import write_text

TEMPLATE = Path(__file__).with_name("template")
RECIPES = TEMPLATE / "recipes"
"""The recipes, in which the facts of a kind are filled in."""
EVERY = "every"
"""The folder of the files that every kind has."""
FACTS = "kind.yaml"
"""The file of a kind that says what it is."""
FILLED = ("README.md", "prefect.yaml")
"""Files of a project in which `$name` and the like are filled in."""
AGENT = "introduce"
"""The agent of most kinds, and their recipe."""
FIRST_KIND = "function"
PINS = EXAMPLES / "constraints.txt"
"""The versions that Ratchet was tested with."""


@dataclass(frozen=True)
class Kind:
    """The facts of a kind of project, which its folder has; its files are filled in with them."""

    folder: Path
    agent_is: str = ""
    """What the agent is, in the project's README, if the project has an agent."""
    flow: str = "train"
    """The flow that trains."""
    agent: str = AGENT
    name: str = AGENT
    """The recipe's name."""
    dataset: str = f"{AGENT}.csv"
    column: str = "identity"
    description: str = "Teach the model to say who it is told to be."
    needs: Mapping[str, str] | None = None
    """Modules that the project imports beyond Ratchet's dependencies, and their packages."""
    folders: Sequence[str] = (AGENT,)
    """Further folders of the template, beside the kind's own."""
    examples: Sequence[str] = ()
    """Files of the examples that the project begins with."""
    recipe: str = "train"
    """The recipe of the kind, a file of RECIPES."""
    install: str = ""
    """Line that installs the agent, if the agent is a program of a package index."""
    further: Section = field(default_factory=dict[str, Json])
    """Values that the recipe has beside those of its file."""
    notes: str = ""
    """What else the project's README says of such a program."""

    @classmethod
    def read(cls, folder: Path) -> "Kind":
        return cls(folder, **read_yaml((folder / FACTS).read_text(encoding="utf-8")))

    def files(self) -> dict[Path, str]:
        """Return the text of each file of a project, by its path in the project."""
        files = {Path(name): (EXAMPLES / name).read_text("utf-8") for name in self.examples}
        for folder in (*(TEMPLATE / name for name in (EVERY, *self.folders)), self.folder):
            for path in folder.rglob("*.*"):
                place = path.relative_to(folder)
                if path.is_file() and path.suffix != ".pyc" and str(place) != FACTS:
                    text = path.read_text(encoding="utf-8")
                    files[place] = self._fill(text) if str(place) in FILLED else text
        return files

    def _fill(self, text: str) -> str:
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        facts |= {"blank": " " * len(f"ratchet {self.name}")}
        common = (RECIPES / f"{self.recipe}.yaml").read_text(encoding="utf-8")
        recipe = Template(common).substitute(facts)
        if self.further:
            recipe = write_yaml(merge_values(read_yaml(recipe), self.further))
        facts |= {"recipe": indent(recipe, " " * 8)}
        return Template(text).substitute(facts)


PROJECT_KINDS = {
    path.parent.name: Kind.read(path.parent) for path in sorted(TEMPLATE.glob(f"*/{FACTS}"))
}
"""The kinds of `ratchet init --kind`, by the names of their folders."""


def init(
    folder: Annotated[
        Path, typer.Argument(help="The project's folder; by default the working folder.")
    ] = Path(),
    kind: Annotated[
        str,
        typer.Option(
            help="How its agent is written: function, resident, command, crewai or gem; or which "
            "program it is: claude-code, codex, opencode, mini-swe-agent or aider; or what it "
            "learns from instead: finetune or prefer."
        ),
    ] = FIRST_KIND,
) -> None:
    for path in write_project(folder, kind):
        show(str(path))
    of_kind, place = PROJECT_KINDS[kind], folder.resolve()
    if of_kind.install:
        show(f"`{of_kind.install}` in {place} installs the agent; then")
    if of_kind.agent_is:
        show(f"`ratchet dryrun {of_kind.name}` in {place} plays the agent")
    else:
        show(f"`ratchet train {of_kind.name}` in {place} trains the model")


def pins() -> None:
    write_data(PINS.read_bytes())


def write_project(folder: Path, kind: str = FIRST_KIND) -> list[Path]:
    """Write the files of a new project, and return them; UserError if one is there or cannot be."""
    return write_files(folder, find_kind(kind))


def write_files(folder: Path, kind: Kind) -> list[Path]:
    """Write the files of a project of a kind, as `write_project` does."""
    texts = {folder / path: text for path, text in sorted(kind.files().items())}
    taken = [str(path) for path in texts if os.path.lexists(path)]
    if taken:
        them = "them" if len(taken) > 1 else "it"
        raise UserError(
            f"{', '.join(taken)} would be written over; move {them} away, or name another folder"
        )
    for path, text in texts.items():
        write_text(path, text)
    return [*texts]


def find_kind(kind: str) -> Kind:
    """Return the kind of a name; UserError if there is none, or it lacks a package here."""
    if kind not in PROJECT_KINDS:
        raise UserError(
            f"there is no kind of project {kind!r}; there are: {', '.join(PROJECT_KINDS)}"
            f"{did_you_mean(kind, PROJECT_KINDS)}"
        )
    needs = PROJECT_KINDS[kind].needs or {}
    if missing := [package for module, package in needs.items() if find_spec(module) is None]:
        only = " on Python 3.11, the last that GEM has a release for" if kind == "gem" else ""
        raise UserError(
            f"a project of the kind {kind} needs {' and '.join(missing)}, not installed here; give "
            f"`pip install --constraint {quote(str(PINS))} {' '.join(needs.values())}`{only}, and "
            "then this command again; nothing has been written"
        )
    return PROJECT_KINDS[kind]
