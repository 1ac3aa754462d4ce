"""Train a policy by supervised learning: it learns to write given texts.

Each step draws texts in a seeded order, and takes one optimizer step on the cross-entropy of their
trained tokens, or on the divergence from a teacher's likeliest tokens at the same positions. The
texts are tokenised once, when the run begins, exactly as the door would have recorded them. The
teacher reads them once, too. The loss on held-out texts measures what was learnt, not a reward.
"""

from prefect import flow

from ratchet.flows.checkpoints.binding import open_teacher
from ratchet.flows.learn_given import learn_given
from ratchet.flows.opening.flow_runs import RunSummary, again_if_engine_dies, name_of_run
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.tasks.given.texts import LongerTexts, ask_teacher


@flow(name="finetune", flow_run_name=name_of_run)
@again_if_engine_dies
def finetune(recipe: FinetuneRecipe, run: str | None = None) -> RunSummary:
    """Train a model on texts.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    return learn_given(recipe, run, ask_teacher_if_any)


def ask_teacher_if_any(run: OpenRun, recipe: FinetuneRecipe) -> None:
    """Have the teacher, if the recipe has one, read the texts that it has not read."""
    teacher, texts = recipe.teacher, recipe.units(run.folder)
    if teacher.model is None or texts.is_bound():
        return
    read = recipe.read_by_teacher() if teacher.reads else None
    longer = None if read is None else LongerTexts(read, run.chat(recipe.model))
    with open_teacher(recipe, run.folder, run.service) as asked:
        ask_teacher(texts, asked, teacher.top_k, longer)
