"""Flows that are run from the command line, with a progress bar and a closing line."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.clock import phases
from ratchet.adapters.process.open_files import check_files
from ratchet.adapters.process.terminal import hanging, say, table_width, write_json
from ratchet.adapters.tinker.engines import engine_begun
from ratchet.adapters.tracking.wandb import unsynced_folder
from ratchet.flows.cli.existing_run import delete_runs
from ratchet.flows.cli.signals import explaining
from ratchet.flows.server.prefect_startup import (
    check_prefect,
    quiet_prefect,
    server_begun,
    start_server,
)
from ratchet.tasks.recording.step_log import EQUAL_REWARDS, steps_done
from ratchet.tasks.storage.plan_record import read_plan
from ratchet.tasks.storage.run_folder import folder_of, name_run

if TYPE_CHECKING:
    from pathlib import Path

    from ratchet.flows.opening.flow_runs import RunSummary
    from ratchet.flows.recipe.plan import StagesRecipe, SweepRecipe
    from ratchet.flows.recipe.run_recipe import RunRecipe
    from ratchet.tasks.storage.run_folder import RunFolder

T = TypeVar("T")

PLAYING = ("replay", "evaluate", "compare", "dryrun")
"""Flows that have the recipe of train, and train no new run by it."""
STEPS = {"reward": 'select step, "reward/mean" from steps'}
"""What is measured on held-out examples → the question about each step's, if it is no loss."""
UNTRAINED = 3
"""Exit status of a run in which no step has trained anything."""
MEND = (
    "have rewards differ within a group: take examples that the model solves sometimes, pay for "
    "part of a solution, or raise rollouts.group_size or rollouts.temperature"
)
Verbose = Annotated[bool, typer.Option(help="Show Prefect's own log.", callback=quiet_prefect)]
"""Option that is obeyed before its command begins: Prefect reads its log level when imported."""
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value over the recipe; `ratchet keys` lists the keys."),
]


def train_with_bar(
    run: str, recipe: "RunRecipe", replaced: "Sequence[RunFolder]" = (), *, as_json: bool = False
) -> None:
    """Run the flow of a run, with a progress bar, and print its closing lines or its summary.

    The command ends with the status UNTRAINED if no step has trained anything.

    The recipe's checks come first, since an engine of a local model puts this process offline, and
    what is `replaced` is deleted after all checks. Prefect, which takes long to import, is looked
    for while the servers load.
    """
    from ratchet.flows.opening.checks import check_start, is_complete

    folder = folder_of(run)
    if folder not in replaced and is_complete(folder, recipe):
        _end(folder, None, as_json=as_json)
        return
    recipe = check_start(recipe, folder, [one.name for one in replaced])
    with server_begun(), engine_begun(recipe.model.base):
        check_prefect()
        delete_runs(replaced)
        with explaining(partial(_explain_stop, folder, recipe.steps)), start_server() as served:
            from ratchet.flows.cli.progress_bar import show_progress

            with show_progress({folder: recipe.steps}):
                flow = _find_flow(folder, recipe.flow)
                with served(), explain_absence(partial(_way_on, folder)):
                    summary = flow(recipe=recipe, run=run)
    _end(folder, summary, as_json=as_json)


def _end(run: "RunFolder", summary: "RunSummary | None", *, as_json: bool) -> None:
    """Print the end of a run; the command has the status UNTRAINED if none of it was trained.

    Without a `summary`, the run was complete before.
    """
    from ratchet.flows.opening.flow_runs import summarize_run

    ended = summary or summarize_run(run)
    spent = phases().describe()
    if as_json:
        write_json(ended.model_dump(mode="json"))
    else:
        say(_closing_lines(ended, run, spent if summary else f"{spent}: nothing was left to do"))
    if ended.is_untrained:
        raise SystemExit(UNTRAINED)


def train_runs(
    run: str,
    recipe: "StagesRecipe | SweepRecipe",
    replaced: "Sequence[RunFolder]" = (),
    *,
    as_json: bool = False,
) -> None:
    """Run the flow of stages or of a sweep, with a bar for each run; print a table of them.

    What is `replaced` is deleted after the checks.
    """
    from ratchet.flows.recipe.plan import SweepRecipe
    from ratchet.flows.stages import check_stages, stages
    from ratchet.flows.sweep import check_sweep, sweep
    from ratchet.tasks.reports.tables import fitted

    folder, deleted = folder_of(run), [one.name for one in replaced]
    way_on = f"`ratchet resume {run}` goes on"
    if isinstance(recipe, SweepRecipe):
        flow, plan, deployed = sweep, check_sweep(recipe, run, deleted), recipe.at_once > 1
    else:
        flow, plan, deployed = stages, check_stages(recipe, run, deleted), False
    check_prefect()
    delete_runs(replaced)
    runs = {folder_of(child.name): child.recipe.steps for child in plan.children}

    def explain() -> str:
        if deployed:
            return f"stopped; workers go on with the runs that they have; {way_on}"
        begun = [one.name for one in runs if one.exists()]
        return f"stopped in {begun[-1]}; {way_on}" if begun else "stopped before the first run"

    from ratchet.flows.cli.progress_bar import show_progress

    with show_progress(runs):
        summary = call_flow(flow, explain, recipe=plan.recipe, run=run)
    if as_json:
        write_json(summary.model_dump(mode="json"))
        return
    record = read_plan(folder)
    table = fitted(*record.table(), table_width(), ["run", "starts at", "held-out", "error"])
    said = [summary.outcome, table, record.note, f"report  {folder.report}"]
    lines = "\n\n".join(filter(None, said))
    say(f"{lines}\nserve   ratchet serve {summary.result}")


def check_deployments(files: Sequence["Path"], name: str | None) -> None:
    """Refuse (RecipeError) a deployment that could not run here, as `ratchet train` would.

    Of all deployments, the examples that Ratchet carries are not looked at unless one is named:
    some of them need what a machine may not have.
    """
    from ratchet.flows.recipe.loading import RecipeError, flow_name, is_carried, read_deployments

    for file in files:
        for of, deployment in read_deployments(file).items():
            values = (deployment.get("parameters") or {}).get("recipe")
            chosen = of == name or (name is None and not is_carried(file))
            if not chosen or not isinstance(values, dict):
                continue  # a flow run brings its recipe
            try:
                _check_deployed(flow_name(deployment["entrypoint"]), values, name_run(of, "new"))
            except UserError as error:
                raise RecipeError(f"the deployment {of} cannot run: {error}") from error


def _check_deployed(flow: str, values: dict[str, Any], run: str) -> None:
    """Refuse (UserError) what would end a new run of a deployment's recipe before its steps."""
    from ratchet.flows.opening.checks import check_recipe, check_start
    from ratchet.flows.recipe.loading import ENTRYPOINTS, TRAIN, changed_recipe, count_steps
    from ratchet.flows.recipe.plan import StagesRecipe, SweepRecipe
    from ratchet.flows.recipe.recipe import Recipe
    from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
    from ratchet.flows.stages import check_stages
    from ratchet.flows.sweep import check_sweep

    trains = flow in ENTRYPOINTS.values()
    if not trains and flow not in PLAYING:
        return  # it is the user's own
    recipe = changed_recipe({"flow": flow if trains else TRAIN, **values}, (), FlowRecipe)
    if isinstance(recipe, StagesRecipe):
        check_stages(recipe, run)
    elif isinstance(recipe, SweepRecipe):
        check_sweep(recipe.model_copy(update={"at_once": 1}), run)  # workers may come later
    elif isinstance(recipe, RunRecipe) and trains:
        check_start(recipe, folder_of(run))
    elif isinstance(recipe, Recipe):  # the run that it needs may come later
        check_recipe(count_steps(recipe))


def call_flow(flow: Callable[..., T], explain: Callable[[], str], **parameters: object) -> T:
    """Call a flow while a Prefect server runs; `explain` says what a stop leaves of it."""
    check_prefect()
    with explaining(explain), start_server() as served:
        from rich.console import Console

        from ratchet.flows.cli.progress_bar import logs_printed_to

        with (
            served(),
            logs_printed_to(Console(stderr=True)),
            explain_absence(lambda: "repeat the command"),
        ):
            return flow(**parameters)


def load_checked_recipe(run: str, overrides: Sequence[str] = ()) -> "RunRecipe":
    """Return a run's recipe with each override over it; UserError if it cannot be trained."""
    from ratchet.flows.opening.checks import check_recipe
    from ratchet.flows.recipe.loading import changed_recipe, count_steps
    from ratchet.flows.recipe.run_recipe import RunRecipe
    from ratchet.tasks.storage.manifest import recipe_of

    folder = folder_of(run)
    recipe = count_steps(changed_recipe(recipe_of(folder), overrides, RunRecipe))
    check_recipe(recipe, folder)
    check_prefect()
    return recipe


def _explain_stop(run: "RunFolder", steps: int) -> str:
    """Say in which step a run was stopped, and how it goes on; there is no time to import much."""
    if not run.exists():
        return "stopped before the run began; nothing is left of it"
    done, steps = steps_done(run.metrics), run.steps_of(steps)
    where = f"in step {done + 1} of {steps}" if done < steps else f"after step {steps} of {steps}"
    return f"stopped {where}; `ratchet resume {run.name}` goes on"


def _way_on(run: "RunFolder") -> str:
    """Name the command that goes on with a run, or begins it again if it has not begun."""
    return f"run `ratchet resume {run.name}`" if run.exists() else "repeat the command"


@contextmanager
def explain_absence(way_on: Callable[[], str]) -> Iterator[None]:
    """Raise a UserError if a server that a flow needs, such as Prefect's, is away or fails.

    `way_on` names the command that goes on with what is on disk by then.
    """
    import httpx

    try:
        yield
    except httpx.TransportError as error:
        check_files(error)
        raise UserError(
            f"{error.request.url} does not answer ({error}). Start the server, or unset "
            f"PREFECT_API_URL; then {way_on()}"
        ) from error
    except httpx.HTTPStatusError as error:
        if not error.response.is_server_error:
            raise
        raise UserError(
            f"{error.request.url} answers {error.response.status_code}, as a Prefect server does "
            f"whose database is locked. Look at what else uses the database; then {way_on()}"
        ) from error


def _find_flow(run: "RunFolder", name: str) -> "Callable[..., RunSummary]":
    """Return the flow of a run, by the name that its recipe has of it."""
    from ratchet.tasks.storage.manifest import REPLAY, parent_of

    parent = parent_of(run) if run.exists() else None
    if parent and parent["how"] == REPLAY:
        from ratchet.flows.replay import replay

        return partial(replay, parent=parent["run"])
    from ratchet.flows.stages import FLOWS

    return FLOWS[name]


def _closing_lines(summary: "RunSummary", run: "RunFolder", spent: str) -> str:
    """Return what a run has come to: its gain, what was `spent` on it, what failed, and so on."""
    from ratchet.tasks.reports.facts import ask_failures, describe_origin

    failed = f"{counted(summary.failed, 'rollout')}, which trained nothing"
    unsent = unsynced_folder(run.tracking)
    drift = " ".join(f"{of_step:.2g}" for of_step in summary.drift)
    measured = STEPS.get(summary.measure, "select step, loss from steps")
    lines = {
        "loss" if summary.measure == "loss" else "gain": summary.gain,
        "mend": MEND if summary.is_untrained and summary.why == EQUAL_REWARDS else "",
        "best": summary.best_checkpoint,
        "split": summary.held_out,
        "trained": describe_origin(run),
        "KL": f"{drift} by step, from the weights that sampled" if drift else "",
        "time": spent,
        "cost": "" if summary.usd is None else f"${summary.usd:.2f}, by `ratchet costs {run.name}`",
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
