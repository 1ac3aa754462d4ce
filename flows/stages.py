"""Train a model in stages: by several recipes, each of which starts where one before it ended.

Each stage is a run of its own, by its own flow, whose first weights are a checkpoint of an earlier
stage. A stage begins when the one before it has finished; one that has finished is never opened
again. One agent may play the same held-out examples after every stage.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from prefect import flow
from pydantic import BaseModel

from adapters.tinker.engines import engines_kept
from flows.evaluate import evaluate_once
from flows.finetune import finetune
from flows.prefer import prefer
from flows.recipe.loading import count_stages, count_steps
from flows.recipe.plan import LAST, Plan, PlannedRun, StagesRecipe
from flows.replay import replay
from flows.runtime.bound_checkpoints import read_step
from flows.runtime.checks import (
    check_answering,
    check_plan,
    check_recipe,
    gone_children,
    is_finished,
)
from flows.runtime.flow_runs import completed, name_of_run, summarize_run
from flows.train import train
from tasks.recording.scores import headline, read_evaluation
from tasks.recording.step_log import read_metrics
from tasks.storage.plan_record import ChildResult, PlanRecord, read_plan, write_plan
from tasks.storage.run_folder import folder_of
from tasks.tracking.prefect_pages import publish_stages

FLOWS = {"train": train, "finetune": finetune, "prefer": prefer, "replay": replay}


class PlanSummary(BaseModel, frozen=True):
    """Results of a run of several runs, and its outcome in words."""

    run: str
    results: Sequence[ChildResult]
    outcome: str

    @property
    def result(self) -> str:
        """Name of the run that was chosen, or else of the last one."""
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
    """Return the plan of stages, with their epochs counted where no earlier stage says how many.

    Refuse (UserError) what would end one before its first step. Runs that are to be `deleted` first
    count as absent.
    """
    recipe = count_stages(recipe)
    plan = check_plan(Plan(run, recipe, recipe.children(run), "agent's reward"), deleted)
    if recipe.evaluate is not None:
        check_recipe(count_steps(recipe.evaluate))
        gone = gone_children(plan.children, deleted)
        for child in plan.children:
            if child not in gone:
                check_answering(recipe.evaluate, child.recipe, child.name)
    return plan


def train_in_turn(children: Sequence[PlannedRun]) -> Iterator[tuple[PlannedRun, str]]:
    """Train the runs that have not finished; one that fails ends the flow."""
    for child in children:
        if not is_finished(child):
            FLOWS[child.recipe.flow](child.recipe, run=child.name)
        yield child, ""


def score(recipe: StagesRecipe, stage: PlannedRun, _: str) -> Iterator[ChildResult]:
    """Yield the result of a stage that has finished; the first stage's own start comes before."""
    step, folder = recipe.handed_on(stage.stage), folder_of(stage.name)
    steps = len(read_metrics(folder.metrics)) if step == LAST else read_step(stage.name, step)
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
    """Return the rewards of the agent that played beside the stages, or else their measures."""
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
    """Have the runs of a plan trained that are not gone; keep a record of what each comes to.

    Args:
        plan: The runs.
        train: Yields each run when it has ended, and why it failed, or nothing.
        measure: Returns the results of a run that has ended.
        conclude: Completes the record of all results.
    """
    folder = folder_of(plan.run)
    gone = gone_children(plan.children)
    recorded = read_plan(folder).results
    results = {one.name: [line for line in recorded if line.run == one.name] for one in gone}
    write_plan(folder, plan.record(results))
    with engines_kept():
        for child, error in train([child for child in plan.children if child not in gone]):
            results[child.name] = [*measure(child, error)]
            write_plan(folder, plan.record(results))
        ended = conclude(plan.record(results))
        write_plan(folder, ended)
    publish_stages(folder)
    return ended
