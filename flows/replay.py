"""Train anew on the rollouts that a run has recorded, under another algorithm.

Nothing is sampled, so every step after the first is off-policy: the importance weights of the loss
correct for it, and metrics `kl_sample_train_…` measure it step by step.
"""

from prefect import flow

from ratchet.flows.checkpoints.forks import replay_run, share_end
from ratchet.flows.opening.checks import check_start
from ratchet.flows.opening.evaluation import HeldOutEvaluations
from ratchet.flows.opening.flow_runs import RunSummary, again_if_engine_dies, end_run, name_of_run
from ratchet.flows.opening.parts import open_parts
from ratchet.flows.opening.rollouts import open_rollouts
from ratchet.flows.opening.run import open_run
from ratchet.flows.opening.steps import PlayedStep
from ratchet.flows.recipe.loading import count_steps
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import learn
from ratchet.tasks.storage.run_folder import folder_of


@flow(name="replay", flow_run_name=name_of_run)
@again_if_engine_dies
def replay(recipe: Recipe, parent: str, run: str | None = None) -> RunSummary:
    """Train on recorded rollouts; only the evaluation of the last checkpoint samples.

    Args:
        recipe: The parent's, with another algorithm, optimizer, judge or evaluation.
        parent: The run whose rollouts are trained on.
        run: The new run's name, a folder under runs/; a run that exists continues where it stopped.
    """
    recipe, name = count_steps(recipe), run or name_of_run()
    if not folder_of(name).exists():
        replay_run(folder_of(parent), name, recipe.model_dump(mode="json"), recipe.fingerprint())
    check_start(recipe, folder_of(name))
    with (
        open_run(recipe, name, on_policy=False) as opened,
        open_rollouts(opened, recipe) as runners,
        open_parts(opened, recipe, runners.judging) as parts,
    ):
        folder = opened.folder
        share_end(folder_of(parent), folder, recipe.steps)  # again, if its record is gone
        steps = (
            PlayedStep(step, [folder.spans(batch) for batch in folder.batches_of(step)])
            for step in opened.steps_left()
        )
        evaluations = HeldOutEvaluations(recipe, opened, runners, first=opened.end())
        learn(opened, recipe, steps, evaluations, parts)
    return end_run(folder)
