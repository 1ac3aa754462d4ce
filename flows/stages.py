"""Train a model in stages: by several recipes, each from a checkpoint of an earlier stage.

Each stage is a run of its own, by its own flow. A stage begins when the stage before it has
finished; a finished stage is never opened again. One agent may be measured after every stage.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import Flow, flow
from pydantic import BaseModel

from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.engines import engines_kept
from ratchet.flows.checkpoints.forks import check_replay
from ratchet.flows.checkpoints.names import read_step
from ratchet.flows.evaluate import evaluate_once
from ratchet.flows.finetune import finetune
from ratchet.flows.opening.checks import check_start, is_complete, is_there, refuse_deleted
from ratchet.flows.opening.flow_runs import completed, name_of_run, summarize_run
from ratchet.flows.prefer import prefer
from ratchet.flows.recipe.loading import RecipeError, count_stages, count_steps
from ratchet.flows.recipe.plan import LAST, Plan, PlannedRun, StagesRecipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.replay import replay
from ratchet.flows.server.deployed_runs import describe_failure
from ratchet.flows.train import train
from ratchet.tasks.recording.scores import headline, read_evaluation
from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.storage.plan_record import Arm, ChildResult, PlanRecord, child_runs, write_plan
from ratchet.tasks.storage.run_folder import RunError, folder_of
from ratchet.tasks.tracking.prefect_pages import publish_stages

FLOWS = {"train": train, "finetune": finetune, "prefer": prefer, "replay": replay}


class PlanSummary(BaseModel, frozen=True):
    """Results of a run of several runs, and its outcome in words."""

    run: str
    results: Sequence[ChildResult]
    outcome: str
    arms: Sequence[Arm] = ()

    @property
    def result(self) -> str:
        """Name of the chosen run, or else of the last run."""
        return next((one.run for one in self.results if one.chosen), self.results[-1].run)


@flow(name="stages", flow_run_name=name_of_run)
def stages(recipe: StagesRecipe, run: str | None = None) -> PlanSummary:
    """Train a model in stages.

    Args:
        recipe: The recipes of the stages, in their order.
        run: Its name; the runs of the stages are RUN-NUMBER-NAME, and go on where they stopped.
    """
    plan = check_stages(recipe, run or name_of_run())
    results = train_plan(plan, train_in_turn, partial(score, recipe)).results
    return completed(PlanSummary(run=plan.run, results=results, outcome=describe(results)))


def check_stages(recipe: StagesRecipe, run: str, deleted: Collection[str] = ()) -> Plan:
    """Return the plan of stages, with epochs counted as steps unless an earlier stage decides them.

    UserError if a stage could not begin its first step. Runs to be `deleted` first count as absent.
    """
    recipe = count_stages(recipe)
    plan = check_plan(Plan(run, recipe, recipe.children(run), "agent's reward"), deleted)
    if recipe.evaluate is not None:
        count_steps(recipe.evaluate).check()
        for child in plan.children:
            recipe.evaluate.check_answering(child.recipe, child.name)
    return plan


def check_plan(plan: Plan, deleted: Collection[str] = ()) -> Plan:
    """Return a plan; refuse (UserError) what would end any of its runs before its first step.

    Runs that are to be `deleted` first count as absent.
    """
    if is_there(folder := folder_of(plan.run), deleted):
        raise RunError(
            f"the run {folder.path} exists, and is no run of {plan.recipe.flow}; give another name"
        )
    names = [child.name for child in plan.children]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"several runs would be called {min(twice)}; give each other values")
    refuse_left_out(plan.run, [*names, *deleted])
    pending = dict[str, RunRecipe]()
    for child in plan.children:
        there = is_there(folder_of(child.name), deleted)
        if there and has_finished(child):
            continue
        later = (folder_of(one.name) for one in plan.children if child.name in one.awaits)
        if not there and any(is_there(one, deleted) for one in later):
            raise RunError(
                f"the run {folder_of(child.name).path} of stage {child.stage} is gone, and a later "
                f"stage has begun; put it back, or give --from {child.stage}, which trains it and "
                "all after it anew"
            )
        check_child(child, pending, deleted)
        pending[child.name] = child.recipe
    return plan


def check_child(
    child: PlannedRun, pending: Mapping[str, RunRecipe], deleted: Collection[str]
) -> None:
    """Refuse (UserError) what would end a run before its first step, if `pending` ones train."""
    folder = folder_of(child.name)
    there = is_there(folder, deleted)
    awaited = {} if there else {name: pending[name] for name in child.awaits & pending.keys()}
    try:
        if child.replayed is not None and not there:
            refuse_deleted([child.replayed], deleted)
            recipe = count_steps(child.recipe)
            check_replay(folder_of(child.replayed), recipe.model_dump(mode="json"))
        check_start(child.recipe, folder, deleted, awaited)
    except UserError as error:
        raise RecipeError(f"{child.name}: {error}") from error


def refuse_left_out(run: str, names: Collection[str]) -> None:
    """Refuse (RunError) a recipe without some of the runs that were begun.

    The record would name them no more, so that no table had them and nothing deleted them.
    """
    if left := [one.name for one in child_runs(folder_of(run)) if one.name not in names]:
        raise RunError(
            f"{folder_of(run).path} has begun {', '.join(left)}, which this recipe does not have; "
            "give their stages or values too, or another name with --run, or start afresh with "
            "--if-exists delete"
        )


def has_finished(child: PlannedRun) -> bool:
    return is_complete(folder_of(child.name), child.recipe)


def train_in_turn(
    children: Sequence[PlannedRun], *, go_on: bool = False
) -> Iterator[tuple[PlannedRun, str]]:
    """Train the runs that have not finished; yield each with its error, empty without one.

    A failure ends the flow, unless it is to `go_on` with the next run.
    """
    for child in children:
        error = ""
        if not has_finished(child):
            trained: Flow[..., Any] = FLOWS[child.flow]
            ended = trained(**{**child.parameters, "recipe": child.recipe}, return_state=go_on)
            error = describe_failure(ended) if go_on else ""
        yield child, error


def score(recipe: StagesRecipe, stage: PlannedRun, _: str) -> Iterator[ChildResult]:
    """Yield the result of a finished stage; before the first stage's, the result of its start."""
    step, folder = recipe.handed_on(stage.stage), folder_of(stage.name)
    steps = steps_done(folder.metrics) if step == LAST else read_step(stage.name, step)
    outcome = summarize_run(folder).outcome
    result = ChildResult(stage.name, steps, stage.stage, stage.start, outcome)
    before = replace(result, step=0, stage="before", held_out="")
    lines = [result] if stage.awaits or recipe.evaluate is None else [before, result]
    for line in lines:
        if recipe.evaluate is None:
            yield line
            continue
        file = evaluate_once(recipe.evaluate, run=line.run, step=line.step).file
        played = headline(read_evaluation(file))
        yield replace(line, measured=played.mean, interval=played.interval)


def describe(results: Sequence[ChildResult]) -> str:
    """Return the rewards of the agent that evaluates the stages, or else their own measures."""
    rewards = [f"{one.measured:.2f}" for one in results if one.measured is not None]
    if rewards:
        return f"held-out reward {' → '.join(rewards)}"
    return "; ".join(f"{one.stage}: {one.held_out}" for one in results)


def train_plan(
    plan: Plan,
    train: Callable[[Sequence[PlannedRun]], Iterable[tuple[PlannedRun, str]]],
    measure: Callable[[PlannedRun, str], Iterable[ChildResult]],
    conclude: Callable[[PlanRecord], PlanRecord] = lambda record: record,
) -> PlanRecord:
    """Train the runs of a plan; record the results of each.

    Args:
        plan: The runs.
        train: Yields each run when it has ended, with its error, empty without one.
        measure: Returns the results of a run that has ended.
        conclude: Completes the record of all results.
    """
    folder = folder_of(plan.run)
    results = dict[str, list[ChildResult]]()
    write_plan(folder, plan.record(results))
    with engines_kept():
        for child, error in train(plan.children):
            results[child.name] = [*measure(child, error)]
            write_plan(folder, plan.record(results))
        ended = conclude(plan.record(results))
        write_plan(folder, ended)
    publish_stages(folder)
    return ended
