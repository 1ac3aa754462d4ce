"""Evaluate one model on held-out examples."""

from prefect import flow
from prefect.runtime import flow_run

from flows.recipe.recipe import Recipe
from flows.runtime.eval_targets import EvalTarget
from flows.runtime.evaluation import EvaluationResult, score, settings_tag, submit_held_out
from flows.runtime.open_run import open_run
from flows.runtime.task_runner import task_runners
from tasks.evaluations import read_evaluation
from tasks.reports.games import list_games


def _name_of_target() -> str:
    asked = flow_run.parameters
    return f"evaluate {asked.get('model') or asked.get('run') or asked['recipe'].agent}"


@flow(name="evaluate", flow_run_name=_name_of_target)
def evaluate(
    recipe: Recipe,
    run: str | None = None,
    checkpoint: int | None = None,
    model: str | None = None,
) -> EvaluationResult:
    """Score a model; what was played before, by the same settings, is read and not repeated.

    Args:
        recipe: Its `evaluation` gives the settings; for a run's checkpoint the rest is the run's.
        run: The run; if empty the newest of the agent whose roles train the same policies.
        checkpoint: After how many steps; the last if empty.
        model: Instead of run and checkpoint, RUN@STEP; or `base`, the recipe's untrained model; or
            a model of LiteLLM, such as openai/gpt-4o-mini, which then answers as the policy.
    """
    target = EvalTarget.find(recipe, run, checkpoint, model)
    asked, tag = target.asked, settings_tag(target.bound, target.asked)
    with (
        open_run(target.bound, target.run) as opened,
        task_runners(target.bound.rollouts, opened) as runners,
    ):
        step = opened.policies.last_step() if target.step is None else target.step
        opened.ledger.at(step)  # refuse a checkpoint that the run does not have
        played = submit_held_out(asked, opened, runners.evaluation, step, tag).wait()
        file = score(asked, opened, played, f"{step:05d}{tag}")
        columns, threshold = asked.dataset.columns, asked.evaluation.threshold
        games = {
            how: list_games(opened.folder.games(p.shard.stem), p.spans, columns, threshold)
            for how, p in played.items()
        }
    return EvaluationResult(file=file, scores=read_evaluation(file), games=games)
