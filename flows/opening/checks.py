"""Checks of a run before a server, an engine or the run's folder exists.

A command makes them before anything starts, and a flow makes the same ones as its first act, since
a flow may have been started by a Prefect server. What a recipe names is checked by its sections.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from ratchet.flows.checkpoints.binding import bind_checkpoints, refuse_itself
from ratchet.flows.checkpoints.names import find_awaited
from ratchet.flows.recipe.loading import check_binding, count_steps, read_recipe, training_command
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.spending.ledger import budget_of, check_priced
from ratchet.tasks.storage.manifest import REPLAY, parent_of, record_files, refuse_changed
from ratchet.tasks.storage.plan_record import has_plan
from ratchet.tasks.storage.run_folder import UNTRAINED_FOLDERS, RunError, RunFolder, folder_of

R = TypeVar("R", bound=RunRecipe)


def check_start(
    recipe: R,
    run: RunFolder,
    deleted: Collection[str] = (),
    awaited: Mapping[str, RunRecipe] = MappingProxyType({}),
    *,
    trains: bool = True,
) -> R:
    """Return the recipe that a run, new or not, is bound to: its epochs are counted in steps.

    Refuse (UserError) what would end the run before its first step. Runs that are to be `deleted`
    first, itself perhaps, count as absent. The `awaited` runs end before this one begins; until
    then only their steps and policies can be checked. What only `trains` is not needed to play.
    """
    later = not awaited.keys().isdisjoint(recipe.queried_runs())
    recipe = recipe if later else count_steps(recipe)
    check_run(recipe, run, deleted, awaited)
    there = is_there(run, deleted)
    recipe.check(run if there else None)
    if trains:
        recipe.check_algorithm()
        if there:
            refuse_changed(run, recipe.checksums(run))
    if not (later or (there and run.bound_files())):
        refuse_deleted(recipe.queried_runs(), deleted)
        refuse_absent(recipe.queried_runs())
        for examples in recipe.given_examples().values():
            len(examples)  # refuses a query that cannot be asked, or chooses nothing
    return recipe


def accept_changes(run: RunFolder) -> None:
    """Record that a run goes on with the files of its recipe as they are now, if steps are left."""
    with run.locked():
        recipe, done = read_recipe(run), steps_done(run.metrics)
        if done < run.steps_of(recipe.steps):
            record_files(run, recipe.checksums(run), done)


def is_complete(run: RunFolder, recipe: RunRecipe) -> bool:
    """Return whether a run has all that training it would make, so that nothing need be opened.

    RunError if it was started with another recipe. A run that lacks a checkpoint or an evaluation,
    which are then made again, is not complete.
    """
    if not run.exists():
        return False
    check_binding(run, recipe := count_steps(recipe))
    steps, parent = run.steps_of(recipe.steps), parent_of(run)
    ledgers = (Ledger(run.checkpoints(policy)) for policy in recipe.policies())
    if steps_done(run.metrics) < steps or any(one.last_step() < steps for one in ledgers):
        return False
    first = steps if parent is not None and parent["how"] == REPLAY else 0
    due = (step for step in range(first, steps + 1) if recipe.evaluation.due(step, steps))
    return not recipe.holds_out() or all(recipe.is_measured(run, step) for step in due)


def check_run(
    recipe: RunRecipe,
    run: RunFolder,
    deleted: Collection[str] = (),
    awaited: Mapping[str, RunRecipe] = MappingProxyType({}),
) -> None:
    """Refuse (UserError) what would end a run of any flow, new or not, before its first step."""
    if has_plan(run) and run.name not in deleted:
        raise RunError(f"the run {run.path} is one of stages, or a sweep; give another name")
    budget, there = recipe.budget, is_there(run, deleted)
    if there:
        check_binding(run, recipe)
        budget = budget_of(run, budget)
    else:
        known = find_awaited(recipe, awaited)
        bound = bind_checkpoints(recipe, known)
        refuse_deleted((bound[name]["run"] for name in bound.keys() - known.keys()), deleted)
        refuse_itself(recipe)
        if run.path.parent.name not in UNTRAINED_FOLDERS:
            recipe.teachers().check_places()
    recipe.tracking.check_installed()
    recipe.model.check_service()
    check_priced(budget, recipe.model.base)


def is_there(run: RunFolder, deleted: Collection[str]) -> bool:
    """Return whether a run exists, and is not one of those that are to be `deleted` first."""
    return run.exists() and run.name not in deleted


def refuse_deleted(needed: Iterable[str], deleted: Collection[str]) -> None:
    """Refuse (RunError) to delete a run that the recipe needs."""
    if lost := sorted({*needed} & {*deleted}):
        raise RunError(
            f"the recipe needs the run {lost[0]}, which is to be deleted first; give the new run "
            "another name by --run, or name another run in the recipe"
        )


def refuse_absent(needed: Iterable[str]) -> None:
    """Refuse (RunError) a recipe that takes what is learnt from a run that does not exist."""
    for run in needed:
        if not (folder := folder_of(run)).exists():
            raise RunError(
                f"the recipe needs the run {run} ({folder.path} is not there); "
                f"`{training_command(run)}` makes it; or name one that `ratchet runs` lists"
            )
