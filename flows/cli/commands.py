"""The commands of Ratchet: their names, the functions that they run, and what they do."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from ratchet.adapters.process.terminal import show
from ratchet.adapters.tinker.engines import begin_engine
from ratchet.flows.server.prefect_startup import begin_server, quiet_prefect
from ratchet.tasks.storage.run_folder import RUNS

COMMANDS = {
    "new_project": {
        "init": "Write a project of your own: an agent, its data set, its recipe and its test.",
        "pins": "Print the versions that Ratchet was tested with, for pip.",
        "keys": "List the keys of a recipe, for --set.",
        "fetch": "Bring a small real model onto this machine, as a base for recipes.",
    },
    "recipes": {
        "dryrun": "Play a few examples, or show texts or pairs as they are trained; train nothing.",
        "doctor": "Say what a Tinker service offers, lacks, and takes but does not honour.",
        "import trinity": "Make a recipe of Trinity-RFT's YAML, and say what has no counterpart.",
    },
    "training": {
        "train": "Train a model: by an agent's rewards, a teacher, texts or pairs, or in stages.",
        "resume": "Continue a run where it stopped, by the recipe it was started with.",
        "fork": "Continue a copy of a run from any of its steps; it shares the earlier files.",
        "replay": "Train anew on a run's recorded rollouts, say by another algorithm.",
        "sweep": "Train a recipe with several values of its keys, and choose the best run.",
    },
    "checkpoints": {
        "evaluate": "Score a model on held-out examples; one that was cut off goes on.",
        "compare": "Compare checkpoints and models on the same held-out examples and seeds.",
        "promote": "Give a checkpoint a name, in place of the one that had it.",
        "serve": "Serve a checkpoint to any OpenAI client, until Ctrl-C or the end of stdin.",
        "export": "Write a checkpoint as a folder, checked, for transformers, PEFT and servers.",
    },
    "runs": {
        "runs": "List the runs of this folder.",
        "watch": "Show what a run of this machine does, until its end or Ctrl-C.",
        "report": "Write a page of HTML about runs: curves, time, costs and rollouts.",
        "board": "Show the runs of this folder in a browser, also while they train, until Ctrl-C.",
        "sql": "Ask the files of runs, by SQL: spans, calls, rollouts, groups, tokens, steps.",
        "find": "Find rollouts by words, reward, error or tool, and show what was said in them.",
        "costs": "Show the tokens that a run has used, by purpose and kind, and their price.",
        "verify": "Check that a run and its engine have every file, each as it was written.",
        "debug": "Play a recorded rollout again, with its answers, under your own debugger.",
    },
    "prune": {"prune": "Remove runs by rules: say which, and with --yes do it."},
    "servers": {
        "server": "Start a Prefect server with its UI, until Ctrl-C.",
        "deploy": "Put the deployments of prefect.yaml and a work pool on the Prefect server.",
        "worker": "Run what the Prefect server schedules, until Ctrl-C.",
    },
}
"""Modules with commands → their words, whose last is the function's name → what they do."""

Verbose = Annotated[bool, typer.Option(help="Show Prefect's own log.", callback=quiet_prefect)]
"""Option that is obeyed before its command begins: Prefect reads its log level when imported."""
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value over the recipe; `ratchet keys` lists the keys."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write the result to stdout as JSON, in place of text.")
]
Name = Annotated[
    str,
    typer.Argument(
        help="A training deployment of prefect.yaml, an example, such as hello, or a YAML file."
    ),
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port on loopback; 0 chooses a free one.")
]


def _of_store(named: str) -> str:
    """Return a run's name; have the command work on the runs of the store of a run's address."""
    address, _, name = named.rpartition("/")
    if "://" not in address:
        return named
    os.environ[RUNS] = address
    return name


RUN_HELP = "A run's name, which `ratchet runs` lists, or its address in an object store."
Run = Annotated[str, typer.Argument(help=RUN_HELP, callback=_of_store)]


FLOW_COMMANDS = {"dryrun", "train", "resume", "fork", "replay", "sweep", "evaluate", "compare"}
"""Commands that call a flow, and so need a Prefect server and, without a service, an engine."""
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


class LateCommand(TyperCommand):
    """A command whose module is imported when it is run, or when its own help is asked for."""

    def load(self) -> Any:
        assert self.callback is not None
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(self.name, help=self.help)(self.callback())
        return get_command(one)

    def make_context(self, info_name: str | None, args: list[str], *of: Any, **extra: Any) -> Any:
        """Read the command's words; the servers that it needs begin to load before."""
        if "--help" not in args:
            if info_name in FLOW_COMMANDS:
                quiet_prefect("--verbose" in args)  # the server reads this, too
                begin_server()
            if info_name in (*FLOW_COMMANDS, "serve") and "--say" not in args:  # a file's turns
                begin_engine()
        return self.load().make_context(info_name, args, *of, **extra)


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
imports = typer.Typer(no_args_is_help=True, help="Make a recipe of another's configuration.")
app.add_typer(imports, name="import")


def _say_version(asked: bool) -> None:
    if asked:
        show(f"ratchet {version('ratchet-rl')}")
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool,
        typer.Option("--version", help="Say the version.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """Trains the agents you already have, and never slips back."""


def _loading(target: str) -> Callable[[], Any]:
    return lambda: resolve_name(f"ratchet.flows.cli.{target}")


for module, commands in COMMANDS.items():
    for words, said in commands.items():
        group, _, word = words.rpartition(" ")
        late = _loading(f"{module}:{word}")
        (imports if group else app).command(word, help=said, cls=LateCommand)(late)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Serve the Tinker API on this machine, for any Tinker program."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ratchet.engine", *context.args])
