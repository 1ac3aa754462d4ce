"""Train a policy on preferences: it learns which of two answers to prefer.

Each step draws pairs in a seeded order, and takes one optimizer step on the loss that `preference`
names, a function of the log-probabilities of each pair's two sides. A reference, whose weights
never change, scores every side once, when the run begins. The share of held-out pairs whose chosen
side the policy prefers measures what was learnt, not a reward.
"""

from prefect import flow

from ratchet.adapters.calls import POLICY
from ratchet.flows.checkpoints.binding import read_bound
from ratchet.flows.learn_given import learn_given
from ratchet.flows.opening.flow_runs import RunSummary, again_if_engine_dies, name_of_run
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.recipe.given_recipes import PreferRecipe
from ratchet.tasks.given.pairs import score_references
from ratchet.tasks.scoring import Reference
from ratchet.tasks.settings.algorithm import BASE


@flow(name="prefer", flow_run_name=name_of_run)
@again_if_engine_dies
def prefer(recipe: PreferRecipe, run: str | None = None) -> RunSummary:
    """Train a model on pairs of answers: one is chosen, one rejected.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    return learn_given(recipe, run, have_scored)


def have_scored(run: OpenRun, recipe: PreferRecipe) -> None:
    """Have the reference, if the loss has one, score the sides that it has not scored."""
    pairs, folder = recipe.units(run.folder), run.folder
    if not pairs.is_bound():
        scored, reference = folder.pair_references, open_reference(run, recipe)
        score_references(scored, pairs.path, reference, folder.reference_parts)


def open_reference(run: OpenRun, recipe: PreferRecipe) -> Reference:
    """Return the reference policy of a run's loss; its weights do not change in the run."""
    preference = recipe.preference
    if preference.reference == BASE:
        return run.service.base_sampler(recipe.model.base)
    if preference.names_checkpoint():
        bound = read_bound(run.folder, preference.reference)
        return run.service.sampler(bound.of(POLICY).sampler)
    return run.policies.main.updater.sampler(0)
