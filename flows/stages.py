"""Train a model in stages: by several recipes, each of which starts where one before it ended.

Each stage is a run of its own, by its own flow, whose first weights are a checkpoint of an earlier
stage. A stage begins when the one before it has finished; one that has finished is never opened
again. One agent may play the same held-out examples after every stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from prefect import flow

from adapters.tinker.engines import engines_kept
from flows.evaluate import evaluate_once
from flows.finetune import finetune
from flows.prefer import prefer
from flows.recipe.recipe import Recipe
from flows.recipe.stages import LAST, StageRun, StagesRecipe
from flows.runtime.checks import check_stages, gone_stages, is_finished
from flows.runtime.flow_runs import StagesSummary, completed, name_of_run, summarize_run
from flows.train import train
from tasks.checkpoints import read_step
from tasks.recording.scores import headline, read_evaluation
from tasks.recording.step_log import read_metrics
from tasks.reports.artifacts import Artifacts
from tasks.storage.run_folder import folder_of
from tasks.storage.stages import StageResult, stage_results, write_stages

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
    return completed(summary)


def in_order(
    parts: Sequence[StageRun], results: Mapping[str, Sequence[StageResult]]
) -> list[StageResult]:
    """List the results that there are, of one stage after the other."""
    return [one for part in parts for one in results.get(part.name, ())]


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
