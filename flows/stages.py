"""Train a model in stages: by several recipes, each of which starts where one before it ended.

Each stage is a run of its own, by its own flow, whose first weights are a checkpoint of an earlier
stage. A stage begins when the one before it has finished; one that has finished is never opened
again. One agent may play the same held-out examples after every stage.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from prefect import flow

from adapters.tinker.engines import engines_kept
from flows.evaluate import evaluate_once
from flows.finetune import finetune
from flows.prefer import prefer
from flows.recipe.loading import count_stages, count_steps
from flows.recipe.recipe import Recipe
from flows.recipe.stages import LAST, StageRun, StagesRecipe
from flows.runtime.checks import check_later, check_recipe, check_start
from flows.runtime.flow_runs import StagesSummary, completed, name_of_run, summarize_run
from flows.train import train
from tasks.checkpoints import read_step
from tasks.comparison.promotions import refuse_promoted
from tasks.evaluations import headline, read_evaluation
from tasks.metrics import read_metrics
from tasks.reports.artifacts import Artifacts
from tasks.storage.files import is_written
from tasks.storage.manifest import check_binding
from tasks.storage.run_folder import RunError, folder_of
from tasks.storage.stages import StageResult, stage_results, stage_runs, write_stages

FLOWS = {"train": train, "finetune": finetune, "prefer": prefer}


@flow(name="stages", flow_run_name=name_of_run)
def stages(recipe: StagesRecipe, run: str | None = None) -> StagesSummary:
    """Train a model in stages.

    Args:
        recipe: The recipes of the stages, in their order.
        run: Its name; the runs of the stages are RUN-NUMBER-NAME, and go on where they stopped.
    """
    run = run or name_of_run()
    recipe, folder = check_stages(recipe, run), folder_of(run)
    parts, values = [*recipe.runs_of(run)], recipe.model_dump(mode="json")
    gone, recorded = gone_stages(parts), stage_results(folder)
    results = {part.name: [one for one in recorded if one.run == part.name] for part in gone}
    write_stages(folder, values, in_order(parts, results))
    with engines_kept(), Artifacts(folder) as artifacts:
        for stage in parts:
            if stage in gone:
                continue
            if not is_finished(stage):
                FLOWS[stage.recipe.flow](stage.recipe, run=stage.name)
            results[stage.name] = [*score(recipe, stage)]
            write_stages(folder, values, in_order(parts, results))
        artifacts.publish_stages()
    summary = StagesSummary(run=run, results=tuple(in_order(parts, results)))
    return completed(summary, summary.outcome)


def in_order(
    parts: Sequence[StageRun], results: Mapping[str, Sequence[StageResult]]
) -> list[StageResult]:
    """List the results that there are, of one stage after the other."""
    return [one for part in parts for one in results.get(part.name, ())]


def gone_stages(parts: Sequence[StageRun], deleted: Collection[str] = ()) -> list[StageRun]:
    """List the stages whose runs are gone: they are not there, and the run of a later stage is.

    They are not trained anew, since the later run has the weights at which it started. Runs that
    are to be `deleted` count as absent.
    """
    there = [is_there(part, deleted) for part in parts]
    return [part for at, part in enumerate(parts) if not there[at] and any(there[at:])]


def is_there(stage: StageRun, deleted: Collection[str]) -> bool:
    """Return whether a stage has a run that is not to be `deleted`."""
    return stage.name not in deleted and folder_of(stage.name).exists()


def is_finished(stage: StageRun) -> bool:
    """Return whether the run of a stage has all it is to have.

    RunError if it is there by another recipe.
    """
    run = folder_of(stage.name)
    if not run.exists():
        return False
    recipe = count_steps(stage.recipe)
    check_binding(run, recipe.model_dump(mode="json"), recipe.fingerprint())
    scored = not isinstance(recipe, Recipe) or is_written(run.evaluation(f"{recipe.steps:05d}"))
    return len(read_metrics(run.metrics)) == recipe.steps and scored


def score(recipe: StagesRecipe, stage: StageRun) -> Iterator[StageResult]:
    """Yield the result of a stage that has finished; the first stage's own start comes before."""
    step, steps = recipe.handed_on(stage.stage), len(read_metrics(folder_of(stage.name).metrics))
    handed_on = steps if step == LAST else read_step(stage.name, step)
    if stage.parent is None and recipe.evaluate is not None:
        yield play(recipe.evaluate, StageResult("before", stage.name, stage.start, 0, ""))
    outcome = summarize_run(folder_of(stage.name)).outcome
    result = StageResult(stage.stage, stage.name, stage.start, handed_on, outcome)
    yield result if recipe.evaluate is None else play(recipe.evaluate, result)


def play(recipe: Recipe, result: StageResult) -> StageResult:
    """Return a result with the reward of an agent that plays held-out examples, unless it has."""
    file = evaluate_once(recipe, run=result.run, step=result.step).file
    played = headline(read_evaluation(file))
    return replace(result, reward=played.mean, interval=played.interval)


def check_stages(recipe: StagesRecipe, run: str, deleted: Collection[str] = ()) -> StagesRecipe:
    """Return the recipe with its epochs counted in steps, where no earlier stage says how many.

    Refuse (UserError) what would end a run of stages before the first step of any of them. Runs
    that are to be `deleted` first count as absent.
    """
    if run not in deleted and (folder := folder_of(run)).exists():
        raise RunError(f"the run {folder.path} exists, and has no stages; give another name")
    refuse_promoted(run)
    recipe = count_stages(recipe)
    parts = [*recipe.runs_of(run)]
    refuse_left_out(run, [*(part.name for part in parts), *deleted])
    gone = {part.stage: part for part in gone_stages(parts, deleted)}
    pending = set[str]()
    for stage in parts:
        there = is_there(stage, deleted)
        if stage.stage in gone or (there and is_finished(stage)):
            continue
        needed = set[str]() if there else recipe.needs(stage.stage)
        refuse_gone(stage, [gone[name] for name in gone if name in needed])
        if needed & pending:
            check_later(stage.recipe, [one.name for one in parts if one.stage in pending], deleted)
        else:
            check_start(stage.recipe, folder_of(stage.name), deleted)
        pending.add(stage.stage)
    if recipe.evaluate is not None:
        check_recipe(recipe.evaluate)
    return recipe


def refuse_gone(stage: StageRun, needed: Sequence[StageRun]) -> None:
    """Refuse (RunError) a stage that needs the runs of earlier ones, which are gone."""
    for one in needed:
        raise RunError(
            f"stage {stage.stage} needs the run {folder_of(one.name).path}, which is gone; put it "
            f"back, or give --from {one.stage}, which trains it and all after it anew"
        )


def refuse_left_out(run: str, names: Collection[str]) -> None:
    """Refuse (RunError) a recipe without some of the runs that a sweep, or stages, have begun.

    The record would name them no more, so that no table had them and nothing deleted them.
    """
    if left := [one.name for one in stage_runs(folder_of(run)) if one.name not in names]:
        raise RunError(
            f"{folder_of(run).path} has begun {', '.join(left)}, of which this recipe has no stage "
            "or values; give those too, or another name with --run, or start afresh with "
            "--if-exists delete"
        )
