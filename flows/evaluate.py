"""evaluate: one checkpoint of a run, on held-out examples."""

from prefect import flow

from flows.opening import opened
from flows.recipe import Recipe
from flows.scoring import score, settings_tag
from tasks.evaluations import Score
from tasks.runs import latest_run, recipe_of, runs_root


@flow(name="evaluate")
def evaluate(
    recipe: Recipe, run: str | None = None, checkpoint: int | None = None
) -> dict[str, Score]:
    """Score a checkpoint; what was scored before, by the same settings, is read and not repeated.

    Args:
        recipe: Whose `evaluation` says how; the rest is the run's own recipe.
        run: The run; the agent's newest if empty.
        checkpoint: After how many steps; the last if empty.
    """
    folder = runs_root() / run if run else latest_run(recipe.agent)
    bound = Recipe.model_validate(recipe_of(folder))
    with opened(bound, folder.name) as parts:
        step = parts.ledger.last_step() if checkpoint is None else checkpoint
        asked = bound.model_copy(update={"evaluation": recipe.evaluation})
        return score(asked, parts, parts.ledger.at(step), settings_tag(bound, asked))
