"""The project that `ratchet init` writes, by the kind of its agent: folders of `template/`."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from string import Template
from textwrap import indent

from adapters.errors import UserError, did_you_mean
from adapters.project.modules import EXAMPLES
from tasks.storage.files import check_output, write_text

TEMPLATE = Path(__file__).with_name("template")
RECIPES = TEMPLATE / "recipes"
"""The recipe of each flow, in which the facts of a kind are filled in."""
EVERY = "every"
"""The folder of the files that every kind has, in which `$name` and the like are filled in."""
AGENT = "introduce"
"""The agent of most kinds, and their recipe."""
PINS = EXAMPLES / "constraints.txt"
"""The versions that Ratchet was tested with."""


class ProjectExists(UserError):
    """Refusal to write over a file of the user's."""


class NoKind(UserError):
    """Refusal of a kind of project that there is not, or that lacks a package here."""


@dataclass(frozen=True)
class Kind:
    """The facts of a kind of project, with which the files that every kind has are filled in."""

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
    folders: tuple[str, ...] = (AGENT,)
    """Further folders of the template, beside the one that is called as the kind is."""

    def fill(self, text: str) -> str:
        """Fill in a file that every kind has."""
        facts = {**asdict(self), "blank": " " * len(f"ratchet {self.name}")}
        recipe = (RECIPES / f"{self.flow}.yaml").read_text(encoding="utf-8")
        lines = Template(recipe).substitute(facts)
        return Template(text).substitute(facts, recipe=indent(lines, " " * 8))


PROJECT_KINDS = {
    "function": Kind(f"`agents/{AGENT}.py` has the agent, a function that plays an example."),
    "resident": Kind(
        f"`agents/{AGENT}.py` is the agent, a program that stays and plays all examples.",
        agent=f"resident:python3 agents/{AGENT}.py",
    ),
    "command": Kind(
        f"`agents/{AGENT}.py` is the agent, a program that is run for each example.",
        agent=f"command:python3 agents/{AGENT}.py",
    ),
    "crewai": Kind(
        f"`agents/{AGENT}.py` has the agent, a CrewAI flow that plays an example.",
        needs={"crewai": "crewai", "litellm": "litellm"},
    ),
    "gem": Kind(
        "The agent plays an environment of GEM, and an example is the seed of a game.",
        agent="gem:game:GuessTheNumber-v0-easy",
        name="guess",
        dataset="guess.jsonl",
        column="seed",
        description="Teach the model to win GEM's GuessTheNumber.",
        needs={"gem": "gem-llm"},
        folders=(),
    ),
    "finetune": Kind(
        flow="finetune",
        dataset=f"{AGENT}.jsonl",
        description="Teach the model by texts to say who it is told to be.",
        folders=(),
    ),
    "prefer": Kind(
        flow="prefer",
        dataset=f"{AGENT}.jsonl",
        description="Teach the model by pairs of answers to say who it is told to be.",
        folders=(),
    ),
}
"""The kinds of `ratchet init --kind`, whose first is the default."""


def write_project(folder: Path, kind: str = "function") -> list[Path]:
    """Write the files of a new project, and return them; UserError if one is there or cannot be."""
    texts = {folder / path: text for path, text in sorted(_files(_find_kind(kind), kind).items())}
    taken = [str(path) for path in texts if os.path.lexists(path)]
    if taken:
        them = "them" if len(taken) > 1 else "it"
        raise ProjectExists(
            f"{', '.join(taken)} would be written over; move {them} away, or name another folder"
        )
    for path in texts:
        check_output(path, "another folder")
    for path, text in texts.items():
        write_text(path, text)
    return [*texts]


def _find_kind(kind: str) -> Kind:
    """Return the kind of a name; NoKind if there is none, or a package of it is not installed."""
    if kind not in PROJECT_KINDS:
        raise NoKind(
            f"there is no kind of project {kind!r}; there are: {', '.join(PROJECT_KINDS)}"
            f"{did_you_mean(kind, PROJECT_KINDS)}"
        )
    needs = PROJECT_KINDS[kind].needs or {}
    if missing := [package for module, package in needs.items() if find_spec(module) is None]:
        only = " on Python 3.11, the last that GEM has a release for" if kind == "gem" else ""
        raise NoKind(
            f"a project of the kind {kind} needs {' and '.join(missing)}, not installed here; give "
            f"`pip install --constraint {quote(str(PINS))} {' '.join(needs.values())}`{only}, and "
            "then this command again; nothing has been written"
        )
    return PROJECT_KINDS[kind]


def _files(kind: Kind, name: str) -> dict[Path, str]:
    """Return the text of each file of a kind, by its path in the project."""
    files: dict[Path, str] = {}
    for folder in (EVERY, *kind.folders, name):
        for path in (TEMPLATE / folder).rglob("*.*"):
            if path.suffix == ".pyc" or path.is_dir():
                continue
            text = path.read_text(encoding="utf-8")
            place = path.relative_to(TEMPLATE / folder)
            files[place] = kind.fill(text) if folder == EVERY else text
    return files
