"""Train a recipe with several values of some of its keys, and choose the best run.

Each run has a flow run of its own. All are measured in the same way on the same held-out examples,
unless their seeds draw different ones. A run that fails is a result, and the others go on; a run
that has finished is never repeated.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import Flow, State, flow
from prefect.client.schemas.objects import FlowRun

from ratchet.adapters.errors import UserError, counted
from ratchet.flows.opening.flow_runs import completed, name_of_run
from ratchet.flows.recipe.loading import RecipeError, changed_recipe, named_recipe
from ratchet.flows.recipe.plan import (
    Plan,
    PlannedRun,
    PlanRecipe,
    StagesRecipe,
    SweepRecipe,
    Values,
    as_overrides,
)
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.server.deployed_runs import (
    Deployment,
    cancel_deployed,
    check_under_way,
    choose_deployment,
    train_deployed,
)
from ratchet.flows.stages import (
    PlanSummary,
    check_plan,
    check_stages,
    has_finished,
    train_in_turn,
    train_plan,
)
from ratchet.tasks.comparison.arms import find_arms
from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.storage.manifest import differences, recipe_of
from ratchet.tasks.storage.plan_record import ChildResult, PlanRecord
from ratchet.tasks.storage.run_folder import RunError, folder_of, name_run

VARIED_SEED, ALL_SEEDS = "seed", "all seeds"
"""The key by which the runs of an arm differ, and the arm of a sweep of nothing else."""


def cancel_children(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Cancel the runs of a cancelled sweep that workers have begun."""
    recipe = SweepRecipe.model_validate(flow_run.parameters["recipe"])
    if recipe.by_workers:
        names = [name_run(flow_run.name, *parts.values()) for parts, _ in recipe.variants()]
        cancel_deployed(names)


@flow(name="sweep", flow_run_name=name_of_run, on_cancellation=[cancel_children])
def sweep(recipe: SweepRecipe, run: str | None = None) -> PlanSummary:
    """Train a recipe with several values of its keys, a run for each combination.

    Args:
        recipe: The recipe that is varied, and the values.
        run: Its name; the runs are RUN-KEYVALUE-…, and go on where they stopped.
    """
    plan = check_sweep(recipe, run or name_of_run())
    select = selected(recipe, plan.children[0].recipe)

    def conclude(record: PlanRecord) -> PlanRecord:
        chosen = replace(record, results=choose(record.results, select))
        seeded = any(VARIED_SEED in values for values in recipe.values())
        return choose_arm(plan, chosen, select) if seeded else chosen

    record = train_plan(plan, partial(train_children, recipe), partial(measure, select), conclude)
    arms, said = record.arms, describe(record)
    return completed(PlanSummary(run=plan.run, results=record.results, arms=arms, outcome=said))


def train_children(
    recipe: SweepRecipe, children: Sequence[PlannedRun]
) -> Iterator[tuple[PlannedRun, str]]:
    """Train the runs of a sweep that have not finished, in turn or by workers.

    Yields each run when it has ended, with its error, empty without one.
    """
    if not recipe.by_workers:
        yield from train_in_turn(children, go_on=True)
        return
    left = {child.name: child for child in children if not has_finished(child)}
    yield from ((child, "") for child in children if child.name not in left)
    deployment = deployment_of(recipe, children[0])
    parameters = {name: child.parameters for name, child in left.items()}
    for name, error in train_deployed(parameters, deployment, recipe.at_once):
        if not error and not has_finished(left[name]):
            raise RunError(
                f"a worker has trained {name} by {deployment.name}, and {folder_of(name).path} "
                "does not have all of it; give the workers and the sweep one folder of runs, by "
                "RATCHET_RUNS, and the same command goes on"
            )
        yield left[name], error


def deployment_of(recipe: SweepRecipe, child: PlannedRun) -> Deployment:
    """Return the deployment of the runs of a sweep; UserError if workers cannot train them."""
    base = recipe.base if isinstance(recipe.base, str) else None
    return choose_deployment(child.flow, recipe.at_once, recipe.deployment, base)


def measure(select: str, child: PlannedRun, error: str) -> Iterator[ChildResult]:
    """Yield the result of a run: the held-out measure of its last checkpoint, or its error."""
    folder = folder_of(child.name)
    steps = steps_done(folder.metrics) if folder.exists() else 0
    result = ChildResult(child.name, steps, error=error, arm=child.arm, seed=child.recipe.seed)
    if not error:
        measured, interval = child.recipe.read_measured(folder, steps, select)
        result = replace(result, measured=measured, interval=interval)
    yield result


def describe(record: PlanRecord) -> str:
    """Return the chosen run, or arm, with its measure and the measure's 95 % interval, in words."""
    arms = [(one.name, one.mean, one.interval) for one in record.arms if one.chosen]
    runs = [(one.run, one.measured, one.interval) for one in record.results if one.chosen]
    (name, measured, within), *_ = arms or runs
    of = f"{counted(len(record.arms), 'arm')} of " if arms else ""
    of += counted(len(record.results), "run")
    interval = " to ".join(f"{end:.3g}" for end in within or ())
    failed = sum(one.error != "" for one in record.results)
    return (
        f"{record.measure} {measured:.3g}{interval and f' ({interval})'} is the best of "
        f"{of}{f', {failed} of which failed' if failed else ''}: {name}"
    )


def choose(results: Sequence[ChildResult], select: str) -> list[ChildResult]:
    """Mark the best run, of equals the first; RunError if all have failed."""
    known = [one for one in results if one.measured is not None]
    if not known:
        raise RunError(
            f"each run has failed ({len(results)}), {results[0].run} since "
            f"{results[0].error}; mend that, and the same command tries them again"
        )
    best = (min if select == "loss" else max)(known, key=lambda one: one.measured or 0.0)
    return [replace(one, chosen=one is best) for one in results]


def choose_arm(plan: Plan, record: PlanRecord, select: str) -> PlanRecord:
    """Return the record with its arms, the best of which is chosen in place of a run."""
    recipes = {child.name: child.recipe for child in plan.children}
    examples = {
        one.run: recipes[one.run].read_examples(folder_of(one.run), one.step, select)
        for one in record.results
        if one.measured is not None
    }
    arms = find_arms(record.results, examples, lowest=select == "loss")
    chosen = {run for arm in arms if arm.chosen for run in arm.runs} & examples.keys()
    results = [replace(one, chosen=one.run in chosen) for one in record.results]
    return replace(record, results=results, arms=arms)


def check_sweep(recipe: SweepRecipe, run: str, deleted: Collection[str] = ()) -> Plan:
    """Return the plan of a sweep; UserError if a run could not begin its first step.

    Runs that will be `deleted` first count as absent.
    """
    children = [_child(recipe, run, *variant) for variant in recipe.variants()]
    select = selected(recipe, children[0].recipe)
    if unmeasured := [child.name for child in children if not child.recipe.holds_out()]:
        raise RecipeError(
            f"{unmeasured[0]} holds nothing out by which runs could be compared; give "
            "dataset.held_out a share"
        )
    first, *others = (child.recipe.measured_by(select) for child in children)
    for child, other in zip(children[1:], others, strict=True):
        if apart := differences(first, other):
            raise RecipeError(
                f"{child.name} is measured otherwise than {children[0].name}, so that they cannot "
                f"be compared ({'; '.join(apart)}); vary no key of evaluation, nor one by which "
                "held-out examples are played, chosen or scored; train such runs apart, and "
                "`ratchet compare` has one agent play the same examples with each"
            )
    plan = check_plan(Plan(run, recipe, children, f"held-out {select}"), deleted)
    if recipe.by_workers:
        deployment_of(recipe, children[0])
        check_under_way({child.name: child.parameters for child in children})
    return plan


def check_runs(recipe: PlanRecipe, run: str, deleted: Collection[str] = ()) -> Plan:
    """Return the plan of stages or of a sweep; UserError if a run could not begin its first step.

    Runs that will be `deleted` first count as absent.
    """
    if isinstance(recipe, SweepRecipe):
        return check_sweep(recipe, run, deleted)
    assert isinstance(recipe, StagesRecipe), "a plan is one of the two"
    return check_stages(recipe, run, deleted)


def selected(recipe: SweepRecipe, child: RunRecipe) -> str:
    """Return the measure by which a run is chosen; RecipeError if the runs do not have it."""
    measures = child.measures()
    if (select := recipe.select or measures[0]) not in measures:
        raise RecipeError(
            f"select {select}: runs of flow {child.flow} are measured by {', '.join(measures)}; "
            "give one of these"
        )
    return select


def _child(recipe: SweepRecipe, run: str, parts: Mapping[str, str], values: Values) -> PlannedRun:
    name, given = name_run(run, *parts.values()), as_overrides(values)
    arm = "-".join(part for key, part in parts.items() if key != VARIED_SEED) or ALL_SEEDS
    try:
        if isinstance(recipe.base, str):
            made = named_recipe(recipe.base, given, RunRecipe)
        else:
            base = recipe.base or recipe_of(folder_of(recipe.replay or ""))
            made = changed_recipe(base, given, RunRecipe)
    except UserError as error:
        raise RecipeError(f"{name}: {error}") from error
    return PlannedRun(name, made, replayed=recipe.replay, arm=arm)
