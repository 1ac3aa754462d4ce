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
from ratchet.flows.server.prefect_startup import begin_server, quiet_prefect

COMMANDS = {
    "init": (
        "new_project:init",
        "Write a project of your own: an agent, its data set, its recipe and its test.",
    ),
    "pins": ("new_project:pins", "Print the versions that Ratchet was tested with, for pip."),
    "keys": ("recipes:keys", "List the keys of a recipe, for --set."),
    "dryrun": (
        "recipes:dryrun",
        "Play a few examples, or show texts or pairs as they are trained, and train nothing.",
    ),
    "import trinity": (
        "recipes:trinity",
        "Make a recipe of Trinity-RFT's YAML, and say what has no counterpart.",
    ),
    "train": (
        "training:train",
        "Train a model: an agent's by its rewards or a teacher, on texts or pairs, or in stages.",
    ),
    "resume": (
        "training:resume",
        "Continue a run where it stopped, by the recipe it was started with.",
    ),
    "fork": (
        "training:fork",
        "Continue a copy of a run from any of its steps; earlier files are shared, not copied.",
    ),
    "replay": (
        "training:replay",
        "Train anew from a run's recorded rollouts, say with another algorithm; nothing is "
        "sampled.",
    ),
    "sweep": (
        "training:sweep",
        "Train a recipe with several values of its keys, and choose the best run.",
    ),
    "evaluate": (
        "checkpoints:evaluate",
        "Score a model on held-out examples; one that was cut off goes on where it stopped.",
    ),
    "compare": (
        "checkpoints:compare",
        "Compare checkpoints and models on the same held-out examples, with the same seeds.",
    ),
    "promote": (
        "checkpoints:promote",
        "Give a checkpoint a name, in place of the one that had it.",
    ),
    "serve": (
        "checkpoints:serve",
        "Serve a checkpoint to any OpenAI client, until Ctrl-C or the end of stdin.",
    ),
    "export": (
        "checkpoints:export",
        "Write a checkpoint as a folder that transformers, PEFT and model servers load, checked.",
    ),
    "runs": ("runs:runs", "List the runs of this folder."),
    "watch": ("runs:watch", "Show what a run of this machine does, until its end or Ctrl-C."),
    "report": (
        "runs:report",
        "Write a page of HTML about a run, or about several: curves, time, costs and rollouts.",
    ),
    "board": (
        "runs:board",
        "Show the runs of this folder in a browser, also while they train, until Ctrl-C.",
    ),
    "sql": (
        "runs:sql",
        "Ask files of runs: spans, calls, rollouts, groups, trajectories, tokens, datums, steps.",
    ),
    "find": (
        "runs:find",
        "Find rollouts by what was said, by reward, error or tool, and show what was said in them.",
    ),
    "costs": (
        "runs:costs",
        "Show the tokens that a run has used, by purpose and kind, and their price.",
    ),
    "verify": (
        "runs:verify",
        "Check that a run has every file that it must, and its engine's, as they were written.",
    ),
    "debug": (
        "runs:debug",
        "Play a recorded rollout again, with its recorded answers, under your own debugger.",
    ),
    "server": ("servers:server", "Start a Prefect server with its UI, until Ctrl-C."),
    "deploy": (
        "servers:deploy",
        "Put the deployments of prefect.yaml, the examples and a work pool on the Prefect server.",
    ),
    "worker": ("servers:worker", "Run what the Prefect server schedules, until Ctrl-C."),
    "doctor": (
        "servers:doctor",
        "Say what a Tinker service offers, lacks, and takes but does not honour, by its values.",
    ),
    "fetch": (
        "fetch_model:fetch",
        "Bring a small real model onto this machine, as a base for a recipe.",
    ),
}
"""Commands by their words → the module and the function, whose parameters are the options; help."""

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
Run = Annotated[str, typer.Argument(help="A run's name; `ratchet runs` lists them.")]


FLOW_COMMANDS = {"dryrun", "train", "resume", "fork", "replay", "sweep", "evaluate", "compare"}
"""Commands that call a flow, and so need a Prefect server."""
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


class LateCommand(TyperCommand):
    """A command whose module is imported when it is run, or when its own help is asked for.

    A server that it needs begins to load before that.
    """

    def load(self) -> Any:
        assert self.callback is not None
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(self.name, help=self.help)(self.callback())
        return get_command(one)

    def make_context(self, info_name: str | None, args: list[str], *of: Any, **extra: Any) -> Any:
        """Read the command's words."""
        if info_name in FLOW_COMMANDS and "--help" not in args:
            quiet_prefect("--verbose" in args)  # the server reads this, too
            begin_server()
        return self.load().make_context(info_name, args, *of, **extra)


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
imports = typer.Typer(
    no_args_is_help=True, help="Make a recipe of another program's configuration."
)
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


for words, (target, said) in COMMANDS.items():
    group, _, word = words.rpartition(" ")
    (imports if group else app).command(word, help=said, cls=LateCommand)(_loading(target))


@app.command(context_settings=PASSED_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Serve the Tinker API on this machine, for any Tinker program."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ratchet.engine", *context.args])
