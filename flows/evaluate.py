"""evaluate: one model, on held-out examples."""

from prefect import flow

from flows.recipe import Recipe
from flows.runtime.eval_targets import Contender
from flows.runtime.open_run import opened
from flows.runtime.scoring import Evaluated, held_out, scored, settings_tag
from tasks.evaluations import read_evaluation
from tasks.stages import list_games


@flow(name="evaluate")
def evaluate(
    recipe: Recipe,
    run: str | None = None,
    checkpoint: int | None = None,
    model: str | None = None,
) -> Evaluated:
    """Score a model; what was played before, by the same settings, is read and not repeated.

    Args:
        recipe: Whose `evaluation` says how; for a run's checkpoint the rest is the run's own.
        run: The run; if empty the newest of the agent whose roles train the same policies.
        checkpoint: After how many steps; the last if empty.
        model: Instead of run and checkpoint, RUN@STEP; or `base`, the recipe's untrained model; or
            a model of LiteLLM, such as openai/gpt-4o-mini, which then answers as the policy.
    """
    contender = Contender.of(recipe, run, checkpoint, model)
    asked, tag = contender.asked, settings_tag(contender.bound, contender.asked)
    with opened(contender.bound, contender.run) as parts:
        folder, step = parts.folder, contender.step
        at = parts.ledger.at(parts.last_step() if step is None else step)
        spans = held_out(asked, parts, at, tag)
        file = scored(asked, folder, spans, f"{at.version}{tag}")
        columns, threshold = asked.dataset.columns, asked.evaluation.threshold
        games = {
            how: list_games(folder, path.stem, path, columns, threshold)
            for how, path in spans.items()
        }
    return Evaluated(file=file, scores=read_evaluation(file), games=games)
