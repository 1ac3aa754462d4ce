"""Runs as they are on disk when they have finished, of which nothing was trained."""

from ratchet.flows.recipe.loading import count_steps
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.given.measures import HeldOutMeasure
from ratchet.tasks.storage.plan_record import ChildResult, PlanRecord, write_plan


def write_finished(name: str, recipe: RunRecipe) -> RunFolder:
    """Write a run that has all its steps, their checkpoints with weights, and the measures that are due."""
    recipe, run = count_steps(recipe), folder_of(name)
    write_manifest(run, recipe.model_dump(mode="json"), recipe.fingerprint())
    for policy in recipe.policies():
        ledger = Ledger(run.checkpoints(policy))
        for step in range(recipe.steps + 1):
            kinds = ("sampler_weights", "weights")
            sampler, state = (f"tinker://{name}-{policy}/{kind}/{step:05d}" for kind in kinds)
            ledger.add(Checkpoint(step, sampler, state))
            for address in (sampler, state):
                key = address.removeprefix("tinker://")
                write_text(run.engine / "checkpoints" / f"{key}.json", "{}")
                write_text(run.engine / "tensors" / f"{key}.0123abcd" / "adapter", "weights")
    for step in range(recipe.steps):
        record_metrics(run.metrics, step, {})
    steps = range(recipe.steps + 1)
    for step in (one for one in steps if recipe.evaluation.due(one, recipe.steps)):
        share = step / recipe.steps
        if isinstance(recipe, Recipe):
            scores = score_outcomes([ScoredRollout(f"group{n}", share * (n % 2)) for n in range(4)])
            scored = {"sampled": scores.model_dump(mode="json")}
            write_json(run.evaluation(f"{step:05d}"), scored)
        else:
            measured = HeldOutMeasure(
                measure="loss",
                examples=1,
                tokens=9,
                value=1 - share / 2,
                standard_error=None,
                interval=None,
                beside={},
            )
            write_json(run.measure(step), measured.model_dump(mode="json"))
    return run


def write_finished_stages(run: str, recipe: StagesRecipe) -> list[RunFolder]:
    """Write a run of stages that has finished; return the runs of its stages."""
    parts = [*recipe.children(run)]
    results = [ChildResult(part.name, 2, part.stage, part.start) for part in parts]
    names, values = [part.name for part in parts], recipe.model_dump(mode="json")
    write_plan(folder_of(run), PlanRecord(values, names, "agent's reward", results))
    return [write_finished(part.name, part.recipe) for part in parts]
