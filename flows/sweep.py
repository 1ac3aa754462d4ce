"""Train a recipe again and again, with other values of some of its keys, and choose a run.

Each run has a flow run of its own, and is measured in the same way on held-out examples, which are
the same unless seeds draw them. One that fails is a result, and the others go on; one that has
finished is never repeated.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prefect import Flow, State, flow
from prefect.client.schemas.objects import FlowRun

from adapters.errors import UserError
from adapters.tinker.engines import engines_kept
from flows.recipe.loading import RecipeError, changed_recipe, count_steps, named_recipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import RunRecipe
from flows.recipe.stages import StageRun
from flows.recipe.sweeps.measured import measured_by
from flows.recipe.sweeps.sweep import SweepRecipe, Values, as_overrides, name_child
from flows.replay import replay
from flows.runtime.checks import check_start, is_finished, refuse_deleted, refuse_left_out
from flows.runtime.flow_runs import SweepSummary, completed, name_of_run
from flows.runtime.forks import check_replay
from flows.server.deployed_runs import (
    Deployment,
    Parameters,
    cancel_deployed,
    check_under_way,
    choose_deployment,
    describe_failure,
    train_deployed,
)
from flows.stages import FLOWS
from tasks.comparison.promotions import refuse_promoted
from tasks.given.held_out import read_measure
from tasks.recording.scores import headline, read_evaluation
from tasks.recording.step_log import read_metrics
from tasks.reports.artifacts import Artifacts
from tasks.storage.manifest import differences, recipe_of
from tasks.storage.run_folder import RunError, folder_of
from tasks.storage.stages import ChildResult, write_sweep

MEASURES: Mapping[str, Sequence[str]] = {
    "train": ("reward", "greedy", "judged"),
    "finetune": ("loss",),
    "prefer": ("accuracy",),
}
"""Flow → what its runs may be chosen by; the first is the default."""


def cancel_children(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Cancel what workers have begun of a sweep that is cancelled."""
    recipe = SweepRecipe.model_validate(flow_run.parameters["recipe"])
    if recipe.at_once > 1:
        cancel_deployed([name_child(flow_run.name, values) for values in recipe.values()])


@flow(name="sweep", flow_run_name=name_of_run, on_cancellation=[cancel_children])
def sweep(recipe: SweepRecipe, run: str | None = None) -> SweepSummary:
    """Train a recipe with several values of its keys, a run for each combination.

    Args:
        recipe: The recipe that is varied, and the values.
        run: Its name; the runs are RUN-KEYVALUE-…, and go on where they stopped.
    """
    run = run or name_of_run()
    children, folder = check_sweep(recipe, run), folder_of(run)
    select = selected(recipe, children[0].recipe)
    values, names = recipe.model_dump(mode="json"), [child.name for child in children]
    write_sweep(folder, values, names, [])
    ended = dict[str, ChildResult]()
    with engines_kept(), Artifacts(folder) as artifacts:
        for child, error in train_children(recipe, run, children):
            ended[child.name] = measure(child, select, error)
            results = [ended[name] for name in names if name in ended]
            write_sweep(folder, values, names, results)
        results = choose([ended[name] for name in names], select)
        write_sweep(folder, values, names, results, describe_draws(children, results))
        artifacts.publish_stages()
    summary = SweepSummary(run=run, select=select, results=tuple(results))
    return completed(summary, summary.outcome)


def train_children(
    recipe: SweepRecipe, run: str, children: Sequence[StageRun]
) -> Iterator[tuple[StageRun, str]]:
    """Train the runs of a sweep that have not finished, in turn or by workers.

    Yields each run when it has ended, and why it failed, or nothing.
    """
    if recipe.at_once == 1:
        for child in children:
            yield child, "" if is_finished(child) else train_child(child, recipe.replay)
        return
    left = {child.name: child for child in children if not is_finished(child)}
    yield from ((child, "") for child in children if child.name not in left)
    deployment, parameters = deployment_of(recipe, run), parameters_of(recipe, left.values())
    for name, error in train_deployed(parameters, deployment, recipe.at_once):
        if not error and not is_finished(left[name]):
            raise RunError(
                f"a worker has trained {name} by {deployment.name}, and {folder_of(name).path} "
                "does not have all of it; give the workers and the sweep one folder of runs, by "
                "RATCHET_RUNS, and the same command goes on"
            )
        yield left[name], error


def deployment_of(recipe: SweepRecipe, run: str) -> Deployment:
    """Return the deployment of the runs of a sweep; UserError if workers cannot train them."""
    first = _child(recipe, run, recipe.values()[0])
    flow = first.recipe.flow if recipe.replay is None else replay.name
    base = recipe.base if isinstance(recipe.base, str) else None
    return choose_deployment(flow, recipe.at_once, recipe.deployment, base)


def parameters_of(recipe: SweepRecipe, children: Iterable[StageRun]) -> dict[str, Parameters]:
    """Map runs of a sweep to the parameters of their flow runs."""
    parent = {} if recipe.replay is None else {"parent": recipe.replay}
    return {
        one.name: {"recipe": one.recipe.model_dump(mode="json"), "run": one.name, **parent}
        for one in children
    }


def train_child(child: StageRun, replayed: str | None) -> str:
    """Train a run of a sweep; return why it failed, or nothing."""
    trained: Flow[..., Any] = FLOWS[child.recipe.flow] if replayed is None else replay
    parent = {} if replayed is None else {"parent": replayed}
    return describe_failure(trained(child.recipe, run=child.name, return_state=True, **parent))


def measure(child: StageRun, select: str, error: str) -> ChildResult:
    """Return what a run has come to, by the held-out examples of its last checkpoint."""
    folder = folder_of(child.name)
    if error:
        done = len(read_metrics(folder.metrics)) if folder.exists() else 0
        return ChildResult(child.name, done, error=error)
    steps = count_steps(child.recipe).steps
    if isinstance(child.recipe, Recipe):
        scores = read_evaluation(folder.evaluation(f"{steps:05d}"))
        scored = headline(scores) if select == "reward" else scores[select].finished
        return ChildResult(child.name, steps, scored.mean, scored.interval)
    measured = read_measure(folder.measure(steps))
    return ChildResult(child.name, steps, measured.value, measured.interval)


def choose(results: Sequence[ChildResult], select: str) -> list[ChildResult]:
    """Mark the best run, of equal ones the first; RunError if every one has failed."""
    known = [one for one in results if one.measured is not None]
    if not known:
        raise RunError(
            f"each run has failed ({len(results)}), {results[0].run} since "
            f"{results[0].error}; mend that, and the same command tries them again"
        )
    best = (min if select == "loss" else max)(known, key=lambda one: one.measured or 0.0)
    return [replace(one, chosen=one is best) for one in results]


def describe_draws(children: Sequence[StageRun], results: Sequence[ChildResult]) -> str:
    """Say that runs were measured on other held-out examples, if their seeds have drawn some."""
    ended = [child for child, one in zip(children, results, strict=True) if not one.error]
    seeds = {child.recipe.seed for child in ended}
    fixed = ended[0].recipe.model_dump()["evaluation"]["seed"] if ended else None
    if len(seeds) < 2 or fixed is not None or not any(_draws(child) for child in ended):
        return ""
    return (
        f"The runs have {len(seeds)} seeds, each of which has drawn held-out examples of its own, "
        "so that their measures differ by these as well; give evaluation.seed, and all runs have "
        "the same."
    )


def _draws(child: StageRun) -> bool:
    """Return whether a finished run was measured on some of its held-out examples, not on all."""
    recipe, most = count_steps(child.recipe), child.recipe.model_dump()["evaluation"]["examples"]
    if isinstance(recipe, Recipe):
        return most < len(recipe.held_out_split().examples())
    return most <= read_measure(folder_of(child.name).measure(recipe.steps)).examples


def check_sweep(recipe: SweepRecipe, run: str, deleted: Collection[str] = ()) -> list[StageRun]:
    """Return the runs of a sweep; refuse (UserError) what would end one before its first step.

    Runs that are to be `deleted` first count as absent.
    """
    if run not in deleted and (folder := folder_of(run)).exists():
        raise RunError(f"the run {folder.path} exists, and is no sweep; give another name")
    refuse_promoted(run)
    children = [_child(recipe, run, values) for values in recipe.values()]
    names = [child.name for child in children]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"several runs would be called {min(twice)}; give each other values")
    refuse_left_out(run, [*names, *deleted])
    select = selected(recipe, children[0].recipe)
    if unmeasured := [child.name for child in children if not child.recipe.holds_out()]:
        raise RecipeError(
            f"{unmeasured[0]} holds nothing out by which runs could be compared; give "
            "dataset.held_out a share"
        )
    first, *others = (measured_by(child.recipe, select) for child in children)
    for name, other in zip(names[1:], others, strict=True):
        if apart := differences(first, other):
            raise RecipeError(
                f"{name} is measured otherwise than {names[0]}, so that they cannot be compared "
                f"({'; '.join(apart)}); vary no key of evaluation, nor one by which held-out "
                "examples are played, chosen or scored; train such runs apart, and `ratchet "
                "compare` has one agent play the same examples with each"
            )
    for child in children:
        _check(child, recipe.replay, deleted)
    if recipe.at_once > 1:
        deployment_of(recipe, run)
        check_under_way(parameters_of(recipe, children))
    return children


def selected(recipe: SweepRecipe, child: RunRecipe) -> str:
    """Return the measure by which a run is chosen; RecipeError if the runs do not have it."""
    measures = MEASURES[child.flow]
    if isinstance(child, Recipe):
        evaluation = child.evaluation
        lacking = {"greedy": not evaluation.greedy, "judged": not evaluation.judge.judges}
        measures = [name for name in measures if not lacking.get(name)]
    if (select := recipe.select or measures[0]) not in measures:
        raise RecipeError(
            f"select {select}: runs of flow {child.flow} are measured by {', '.join(measures)}; "
            "give one of these"
        )
    return select


def _child(recipe: SweepRecipe, run: str, values: Values) -> StageRun:
    name, given = name_child(run, values), as_overrides(values)
    try:
        if isinstance(recipe.base, str):
            made = named_recipe(recipe.base, given, RunRecipe)
        else:
            base = recipe.base or recipe_of(folder_of(recipe.replay or ""))
            made = changed_recipe(base, given, RunRecipe)
    except UserError as error:
        raise RecipeError(f"{name}: {error}") from error
    return StageRun(name, name, made, None, "")


def _check(child: StageRun, replayed: str | None, deleted: Collection[str]) -> None:
    folder = folder_of(child.name)
    try:
        if replayed is not None and (child.name in deleted or not folder.exists()):
            refuse_deleted([replayed], deleted)
            recipe = count_steps(child.recipe)
            check_replay(folder_of(replayed), recipe.model_dump(mode="json"))
        check_start(child.recipe, folder, deleted)
    except UserError as error:
        raise RecipeError(f"{child.name}: {error}") from error
