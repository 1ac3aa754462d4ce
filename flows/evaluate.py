"""Evaluate one model on held-out examples."""

from prefect import flow
from prefect.runtime import flow_run

from ratchet.adapters.errors import UserError
from ratchet.flows.opening.eval_targets import EvalTarget, find_target
from ratchet.flows.opening.evaluation import (
    EvaluationResult,
    reopen_evaluation,
    score_held_out,
    submit_held_out,
)
from ratchet.flows.opening.flow_runs import again_if_engine_dies, completed
from ratchet.flows.opening.rollouts import open_rollouts
from ratchet.flows.opening.run import open_run
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.recording.scores import is_scored, read_evaluation
from ratchet.tasks.reports.rollouts import list_games
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.tracking.prefect_pages import publish_evaluations


def _name_of_target() -> str:
    """Name the flow run after its target, or after the agent if the flow will refuse the target."""
    parameters = flow_run.parameters
    named = (parameters.get(name) for name in ("run", "checkpoint", "model"))
    try:
        return f"evaluate {EvalTarget.find(parameters['recipe'], *named).title}"
    except UserError:
        return f"evaluate {parameters['recipe'].agent}"


@flow(name="evaluate", flow_run_name=_name_of_target)
@again_if_engine_dies
def evaluate(
    recipe: Recipe,
    run: str | None = None,
    checkpoint: int | None = None,
    model: str | None = None,
    as_given: bool = False,
    redo_failed: bool = False,
) -> EvaluationResult:
    """Score a model; rollouts by the same settings that are on disk are not played again.

    Args:
        recipe: Its `evaluation` gives the settings; for a checkpoint of its agent's the rest is the
            run's.
        run: The run; if empty the newest of the agent whose roles train the same policies.
        checkpoint: After how many steps; the last if empty.
        model: Instead of run and checkpoint, RUN@STEP or RUN@best; or `base`, the recipe's
            untrained model; or a model of LiteLLM, such as openai/gpt-4o-mini, which then answers
            as the policy.
        as_given: Play the recipe's own agent, data and rollouts with the weights of any run.
        redo_failed: Play the rollouts again that failed when the same was evaluated before.
    """
    target = find_target(recipe, run, checkpoint, model, as_given)
    requested = target.requested
    columns, threshold = requested.dataset.columns, requested.evaluation.threshold
    tag = target.tag
    with (
        open_run(target.bound, target.run, played=requested) as opened,
        open_rollouts(opened, requested) as runners,
    ):
        step = opened.policies.last_step() if target.step is None else target.step
        opened.ledger.at(step)  # refuse a checkpoint that the run does not have
        if redo_failed:
            reopen_evaluation(opened.folder, step, tag)
        submitted = submit_held_out(requested, opened.folder, runners.evaluation, step, tag)
        played = score_held_out(requested, opened.folder, runners, submitted, step, tag)
        file = opened.folder.evaluation(f"{step:05d}{tag}")
        games = {
            how: durable(list_games)(opened.folder.games(p.shard.stem), p.spans, columns, threshold)
            for how, p in played.items()
        }
        result = EvaluationResult(file=file, scores=read_evaluation(file), games=games)
        publish_evaluations(opened.folder, result.tag)
    return completed(result)


def evaluate_once(
    recipe: Recipe, run: str | None = None, step: int | None = None, model: str | None = None
) -> EvalTarget:
    """Run `evaluate` by the recipe as it is given, unless it has scores; return the target.

    If it has some, neither a service nor an engine is started.
    """
    target = find_target(recipe, run, step, model, as_given=True)
    if not is_scored(target.file):
        evaluate(recipe, run=run, checkpoint=step, model=model, as_given=True)
    return target
