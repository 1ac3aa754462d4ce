"""The commands that train a run, or several, with a progress bar and closing lines."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from shlex import quote
from typing import TYPE_CHECKING, Annotated, TypeVar

import httpx
import psutil
import typer
from rich.console import Console

from ratchet.adapters.errors import UserError, counted, did_you_mean
from ratchet.adapters.process.open_files import check_files
from ratchet.adapters.process.terminal import hanging, show, terminal_width, write_json
from ratchet.adapters.tinker.engines import stay_offline
from ratchet.flows.checkpoints.forks import fork_run, replay_run
from ratchet.flows.checkpoints.names import CheckpointName
from ratchet.flows.cli.commands import AsJson, Name, Overrides, Run, Verbose
from ratchet.flows.cli.signals import explaining
from ratchet.flows.opening.checks import accept_changes, check_start, is_complete
from ratchet.flows.recipe.loading import changed_recipe, count_steps, named_recipe, swept_recipe
from ratchet.flows.recipe.plan import PlanRecipe
from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
from ratchet.flows.server.prefect_startup import check_prefect, last_said, start_server
from ratchet.tasks.comparison.promotions import refuse_promoted
from ratchet.tasks.recording.step_log import EQUAL_REWARDS, steps_done
from ratchet.tasks.recording.transcripts import tell_rewarded
from ratchet.tasks.reports.facts import ask_failures, describe_origin
from ratchet.tasks.reports.tables import fitted
from ratchet.tasks.settings.presets import describe_preset
from ratchet.tasks.spending.ledger import check_grant, grant, read_limits
from ratchet.tasks.storage.manifest import REPLAY, parent_of, recipe_of
from ratchet.tasks.storage.plan_record import child_runs, has_plan, read_plan
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of, name_run
from ratchet.tasks.tracking.trackers import unsynced_folder

if TYPE_CHECKING:
    from ratchet.flows.opening.flow_runs import RunSummary

T = TypeVar("T")

UNTRAINED = 3
"""Exit status of a run in which no step has trained anything."""
MEND = (
    "have rewards differ within a group: take examples that the model solves sometimes, pay for "
    "part of a solution, or raise rollouts.group_size or rollouts.temperature"
)
REPEAT = "repeat the command"
TOKENIZERS, CLIENT = "transformers.models.auto.tokenization_auto", "openai.resources.chat"
NewRun = Annotated[
    str | None, typer.Option("--run", help="The new run's name; by default made of the old one's.")
]


class IfExists(StrEnum):
    """Treatments of a run that exists, named as in the Tinker cookbook."""

    RESUME = "resume"
    RAISE = "raise"
    DELETE = "delete"


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
        IfExists, typer.Option(help="What to do where the run exists.")
    ] = IfExists.RAISE,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="First stage to train again; the stages before it are kept."),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    name = f"{name}-search" if search else name
    short = {"steps": steps, "rollouts.batches": batches}
    overrides = [*(set_ or []), *(f"{key}={n}" for key, n in short.items() if n is not None)]
    recipe = named_recipe(name, overrides, FlowRecipe)
    run = run or name_run(Path(name).stem, now())
    if from_ is None:
        replaced = find_replaced(run, if_exists)
    else:
        replaced = find_replaced_from(run, recipe.names(), from_)
    _train(run, recipe, replaced, as_json=as_json)


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
        str | None, typer.Option(help="Measure: reward, greedy, judged, loss or accuracy.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(help="Runs that workers of the Prefect server train at the same time."),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option(help="Deployment by which a worker trains each run, FLOW/NAME.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The sweep's name.")] = None,
    if_exists: Annotated[
        IfExists, typer.Option(help="What to do where the sweep exists.")
    ] = IfExists.RAISE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    if (name is None) == (replay is None):
        raise UserError("a sweep is of a recipe or of a run's rollouts; give NAME or --replay RUN")
    given = {"select": select, "at_once": at_once, "deployment": deployment}
    chosen = {key: value for key, value in given.items() if value is not None}
    recipe = swept_recipe(name, replay, chosen, set_ or [])
    run = run or name_run(name or f"{replay}", "sweep", now())
    train_runs(run, recipe, find_replaced(run, if_exists), as_json=as_json)


def resume(
    run: Run,
    budget: Annotated[
        list[str] | None, typer.Option(help="A larger limit of what it may spend: usd=40, tokens=…")
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Go on with data and code that have changed.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    folder = folder_of(run)
    for one in filter(RunFolder.exists, child_runs(folder) or [folder]) if changed else ():
        accept_changes(one)
    if budget:
        from ratchet.flows.server.deployed_runs import resume_waiting

        limits, granted = read_limits(budget), child_runs(folder) or [folder]
        for one in granted:
            check_grant(one, limits)  # refuses a run that is not there, too
        for one in granted:
            grant(one, limits)
        if resume_waiting(run):
            show(f"{run} goes on where it waited")
            return
    if has_plan(folder):
        _train(run, changed_recipe(read_plan(folder).recipe, kind=FlowRecipe), as_json=as_json)
    else:
        train_with_bar(run, changed_recipe(recipe_of(folder), kind=RunRecipe), as_json=as_json)


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
    named = CheckpointName.parse(forked := f"{run}@{at}" if at else run)
    named.check_whole(forked)
    run, step = named.run, named.step
    if step is None:
        raise UserError(f"--at is missing: give the step at which {run} is forked, or best")
    recipe = load_checked_recipe(run, set_ or [])
    name = name or f"{run}-at-{step}"
    fork_run(folder_of(run), name, step, recipe.model_dump(mode="json"), recipe.fingerprint())
    _train(name, recipe, as_json=as_json)


def replay(
    run: Run,
    set_: Overrides = None,
    name: NewRun = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    recipe = load_checked_recipe(run, set_ or [])
    name = name or name_run(run, "replay", now())
    replay_run(folder_of(run), name, recipe.model_dump(mode="json"), recipe.fingerprint())
    _train(name, recipe, as_json=as_json)


def _train(
    run: str, recipe: FlowRecipe, replaced: Sequence[RunFolder] = (), *, as_json: bool
) -> None:
    """Print what the recipe's preset has become, if it has one; train, and print the summary."""
    if said := describe_preset(recipe.model_dump()):
        show(said, sys.stderr if as_json else None)
    if isinstance(recipe, RunRecipe):
        train_with_bar(run, recipe, replaced, as_json=as_json)
    elif isinstance(recipe, PlanRecipe):
        train_runs(run, recipe, replaced, as_json=as_json)


def now() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def train_with_bar(
    run: str, recipe: RunRecipe, replaced: Sequence[RunFolder] = (), *, as_json: bool = False
) -> None:
    """Run the flow of a run, with a progress bar, and print its closing lines or its summary.

    The recipe's checks come first, since a local model puts this process offline, and what is
    `replaced` is deleted after all checks.
    """
    folder = folder_of(run)
    followed = recipe.tracking.project is not None  # its tracker may be behind
    if folder not in replaced and not followed and is_complete(folder, recipe):
        _end(folder, None, as_json=as_json)
        return
    recipe = check_start(recipe, folder, [one.name for one in replaced])
    stay_offline(recipe.model.base)
    check_prefect()
    delete_runs(replaced)
    with explaining(partial(_explain_stop, folder, recipe.steps)), start_server() as served:
        from ratchet.flows.cli.progress_bar import show_progress

        with show_progress({folder: recipe.steps}):
            flow = _find_flow(folder, recipe.flow)
            way = f"run `ratchet resume {run}`"
            with served(), explain_absence(lambda: way if folder.exists() else REPEAT):
                summary = flow(recipe=recipe, run=run)
    _end(folder, summary, as_json=as_json)


def _end(run: RunFolder, summary: "RunSummary | None", *, as_json: bool) -> None:
    """Print the end of a run; the command has the status UNTRAINED if none of it was trained.

    Without a `summary`, the run was complete before.
    """
    from ratchet.flows.opening.flow_runs import summarize_run

    ended = summary or summarize_run(run)
    spent = f"{time.time() - psutil.Process().create_time():.0f} s"
    if as_json:
        write_json(ended.model_dump(mode="json"))
    else:
        show(_closing_lines(ended, run, spent if summary else f"{spent}: nothing was left to do"))
    if ended.is_untrained:
        raise SystemExit(UNTRAINED)


def train_runs(
    run: str, recipe: PlanRecipe, replaced: Sequence[RunFolder] = (), *, as_json: bool = False
) -> None:
    """Run the flow of stages or of a sweep, with a bar for each run; print a table of them.

    What is `replaced` is deleted after the checks.
    """
    from ratchet.flows.cli.progress_bar import show_progress
    from ratchet.flows.stages import stages
    from ratchet.flows.sweep import check_runs, sweep

    folder, deleted = folder_of(run), [one.name for one in replaced]
    way_on = f"`ratchet resume {run}` goes on"
    flow = {"stages": stages, "sweep": sweep}[recipe.flow]
    plan = check_runs(recipe, run, deleted)
    check_prefect()
    delete_runs(replaced)
    runs = {folder_of(child.name): child.recipe.steps for child in plan.children}

    def explain() -> str:
        if recipe.by_workers:
            return f"stopped; workers go on with the runs that they have; {way_on}"
        begun = [one.name for one in runs if one.exists()]
        return f"stopped in {begun[-1]}; {way_on}" if begun else "stopped before the first run"

    with show_progress(runs):
        summary = call_flow(flow, explain, recipe=plan.recipe, run=run)
    if as_json:
        write_json(summary.model_dump(mode="json"))
        return
    record = read_plan(folder)
    cut = ["run", "starts at", "held-out", "error"]
    tables = [fitted(*table, terminal_width(), cut) for table in record.tables()]
    said = [summary.outcome, *tables, f"report  {folder.report}"]
    lines = "\n\n".join(filter(None, said))
    show(f"{lines}\nserve   ratchet serve {summary.result}")


def call_flow(flow: Callable[..., T], explain: Callable[[], str], **parameters: object) -> T:
    """Call a flow while a Prefect server runs; `explain` says what a stop leaves of it."""
    check_prefect()
    with explaining(explain), start_server() as served:
        from ratchet.flows.cli.progress_bar import logs_printed_to

        with served(), logs_printed_to(Console(stderr=True)), explain_absence(lambda: REPEAT):
            return flow(**parameters)


def load_checked_recipe(run: str, overrides: Sequence[str] = ()) -> RunRecipe:
    """Return a run's recipe with each override over it; UserError if it cannot be trained."""
    folder = folder_of(run)
    recipe = count_steps(changed_recipe(recipe_of(folder), overrides, RunRecipe))
    recipe.check(folder)
    check_prefect()
    return recipe


def _explain_stop(run: RunFolder, steps: int) -> str:
    """Say in which step a run was stopped, and how it goes on; there is no time to import much."""
    if not run.exists():
        return "stopped before the run began; nothing is left of it"
    done, steps = steps_done(run.metrics), run.steps_of(steps)
    where = f"in step {done + 1} of {steps}" if done < steps else f"after step {steps} of {steps}"
    return f"stopped {where}; `ratchet resume {run.name}` goes on"


@contextmanager
def explain_absence(way_on: Callable[[], str]) -> Iterator[None]:
    """Raise a UserError if a server that a flow needs, such as Prefect's, is away or fails.

    `way_on` names the command that goes on with what is on disk by then.
    """
    try:
        yield
    except (httpx.TransportError, httpx.HTTPStatusError) as error:
        check_files(error)
        said, remedy = f"does not answer ({error})", "Start the server, or unset PREFECT_API_URL"
        if isinstance(error, httpx.HTTPStatusError):
            if not error.response.is_server_error:
                raise
            said, remedy = f"answers {error.response.status_code}", "Look at that server's log"
        raise UserError(
            f"{error.request.url} {said}{last_said()}. {remedy}; then {way_on()}"
        ) from error


def _find_flow(run: RunFolder, name: str) -> "Callable[..., RunSummary]":
    """Import a run's flow alone: each has its form made at its import.

    What a first tokenizer and a first call would import is imported while the server loads.
    """
    import_module(TOKENIZERS)
    if "openai" in sys.modules:  # by the agent
        import_module(CLIENT)
    parent = parent_of(run) if run.exists() else None
    if parent and parent["how"] == REPLAY:
        return partial(resolve_name("ratchet.flows.replay:replay"), parent=parent["run"])
    return resolve_name(f"ratchet.flows.{name}:{name}")


def _closing_lines(summary: "RunSummary", run: RunFolder, spent: str) -> str:
    """Return what a run has come to: its gain, what was `spent` on it, what failed, and so on."""
    failed = f"{counted(summary.failed, 'rollout')}, which trained nothing"
    unsent = unsynced_folder(run.tracking)
    drift = " ".join(f"{of_step:.2g}" for of_step in summary.drift)
    measured = 'select step, "reward/mean" from steps'
    if summary.measure != "reward":
        measured = "select step, loss from steps"
    lines = {
        "loss" if summary.measure == "loss" else "gain": summary.gain,
        "measure": summary.measures,
        "mend": MEND if summary.is_untrained and summary.why == EQUAL_REWARDS else "",
        "best": summary.best_checkpoint,
        "split": summary.held_out,
        "trained": describe_origin(run),
        "KL": f"{drift} by step, from the weights that sampled" if drift else "",
        "time": spent,
        "cost": "" if summary.usd is None else f"${summary.usd:.2f}, by `ratchet costs {run.name}`",
        "ended": tell_rewarded(summary.rewarded),
        "failed": failed if summary.failed else "",
        "error": summary.error,
        "note": "" if summary.reproducible else "no other run repeats it",
        "run": str(run.path),
        "report": str(run.report) if run.report.exists() else "",
        "see": ask_failures(run.name)
        if summary.failed
        else f"ratchet sql --run {run.name} '{measured}'",
        "serve": f"ratchet serve {run.name}",
        "W&B": f"wandb sync {quote(str(unsent))}" if unsent else "",
    }
    said = [hanging(f"{label:8}{line}", 8) for label, line in lines.items() if line]
    return "\n".join([summary.outcome, *said])


def find_replaced(run: str, if_exists: IfExists) -> list[RunFolder]:
    """Return what is to be deleted before a run is trained; RunError if that may not be."""
    existing = folder_of(run)
    if not existing.exists() and not has_plan(existing):
        return []
    if if_exists is IfExists.RAISE:
        raise RunError(
            f"the run {existing.path} exists; continue it with --if-exists resume, start it afresh "
            "with --if-exists delete, or give another name with --run"
        )
    return _from(existing, 0) if if_exists is IfExists.DELETE else []


def find_replaced_from(whole: str, names: Sequence[str], stage: str) -> list[RunFolder]:
    """Return what is to be deleted before a stage and those after it are trained anew.

    RunError if one before it is not there, which would be trained anew as well.
    """
    if stage not in names:
        named = f"the stages are {', '.join(names)}" if names else "the recipe has no stages"
        raise RunError(f"--from {stage}: {named}{did_you_mean(stage, names)}")
    if not has_plan(folder := folder_of(whole)):
        raise RunError(f"--from {stage}: there is no run {whole} of stages; name one by --run")
    first = names.index(stage)
    for name, run in zip(names[:first], read_plan(folder).runs, strict=False):
        if not folder_of(run).exists():
            raise RunError(
                f"--from {stage}: the run {folder_of(run).path} of an earlier stage is not there; "
                f"put it back, or give --from {name}, which trains it anew"
            )
    return _from(folder, first)


def delete_runs(runs: Sequence[RunFolder]) -> None:
    """Delete runs in their order, or none (UserError) if one is open, or promoted."""

    refuse_promoted([run.name for run in runs])
    for run in runs:
        with run.locked():
            pass
    for run in runs:
        run.delete()


def _from(run: RunFolder, first: int) -> list[RunFolder]:
    """List the runs of the stages from number `first`, the last first, and then that of all."""
    return [*reversed(child_runs(run, first)), *([] if first else [run])]
