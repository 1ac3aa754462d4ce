"""What a recipe needs of a service, by the key that asks for it."""

from collections.abc import Iterator
from dataclasses import dataclass

from ratchet.adapters.diagnosis.bench import ROUGH, Finding
from ratchet.adapters.diagnosis.examination import TITLES, Diagnosis
from ratchet.flows.recipe.finetuning import FinetuneRecipe
from ratchet.flows.recipe.preferring import PreferRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe


@dataclass(frozen=True)
class ServiceNeed:
    """One thing that a recipe needs: the finding that tells of it, and the key that asks for it.

    A number of the finding that is at most `most` suffices. With a `cost` a run goes on without it,
    and says that.
    """

    finding: str
    key: str
    remedy: str
    most: float | None = None
    cost: str = ""

    def is_met(self, found: Finding) -> bool:
        """Return whether a finding is what the recipe needs; what is not known is taken for it."""
        if self.most is not None and found.value is not None:
            return found.value <= self.most
        return found.verdict in ("offers", "unknown")


@dataclass(frozen=True)
class Unmet:
    """A need that a service does not meet, or of which nothing is known, with what was found."""

    need: ServiceNeed
    found: Finding

    def fact(self) -> str:
        """Say what is needed by which key, and what came of it."""
        found = self.found
        does = {"LIES": "does not honour", "unknown": "has not shown"}.get(found.verdict, "lacks")
        expected = f"expected {found.expected}, got " if found.expected else ""
        came = f"{expected}{found.measured}"
        return f"it {does} {TITLES[found.name]}, which {self.need.key} needs ({came})"

    def describe(self) -> str:
        """Return the fact with its remedy."""
        return f"{self.fact()}; {self.need.remedy}"


CLIPPING = ("ppo", "cispo", "gspo")
"""Losses of the service that have thresholds."""
SEEDS_COST = (
    "another run of the recipe does not have the same weights, and calls that a crash has lost "
    "are sampled anew"
)
OPTIMIZER_COST = (
    "no training state is saved after the first, and a crash applies the recorded datums of every "
    "step again"
)
MOMENTS_COST = "the first steps go on with the moments of that checkpoint's optimizer"
OUTLIVED_COST = "weights that are sampled after a restart are made again from recorded steps first"
SAMPLER_FINDINGS = ("logprobs", "company")
"""Findings of how far a sampler is off the trainer of its weights."""
WIDER = 4.0
"""Rebuilt weights may be so many times as far off as a sampler is off its trainer."""
ROUGH_COST = f"what a crash rebuilds is compared within {WIDER:g} times that"
END_COST = "the training clients of a session that has ended may keep their places"


def needs(recipe: RunRecipe) -> list[ServiceNeed]:
    """List what a run of a recipe needs of its service."""
    return [*_always(recipe), *_of_training(recipe), *_of_scores(recipe)]


def unmet(recipe: RunRecipe, diagnosis: Diagnosis) -> list[Unmet]:
    """List the needs of a recipe that a service does not meet."""
    known = [(need, diagnosis.of(need.finding)) for need in needs(recipe)]
    lacking = [Unmet(need, found) for need, found in known if found and not need.is_met(found)]
    refused = {one.found.name for one in lacking if not one.need.cost}
    return [one for one in lacking if not one.need.cost or one.found.name not in refused]


def not_known(recipe: RunRecipe, diagnosis: Diagnosis) -> list[Unmet]:
    """List the needs of a recipe of which a diagnosis does not know whether they are met."""
    known = [(need, diagnosis.of(need.finding)) for need in needs(recipe)]
    return [Unmet(need, found) for need, found in known if found and found.verdict == "unknown"]


def _always(recipe: RunRecipe) -> Iterator[ServiceNeed]:
    base, checkpoints = recipe.model.base, recipe.checkpoints
    other = "use another service"
    yield ServiceNeed("wire", f"model.base {base}", f"{other}, or a version of it for this SDK")
    yield ServiceNeed("session_end", "service", other, cost=END_COST)
    yield ServiceNeed(
        "outlives", f"checkpoints.every {checkpoints.every}", other, cost=OUTLIVED_COST
    )
    yield ServiceNeed("state", f"checkpoints.every {checkpoints.every}", other)
    asked = f"model.start_optimizer {recipe.model.start_optimizer}"
    yield ServiceNeed(
        "optimizer",
        asked if recipe.model.start_optimizer else f"checkpoints.every {checkpoints.every}",
        "leave model.start_optimizer out",
        cost="" if recipe.model.start_optimizer else OPTIMIZER_COST,
    )
    if recipe.model.start and not recipe.model.start_optimizer:
        key = f"model.start {recipe.model.start}"
        yield ServiceNeed("no_moments", key, other, cost=MOMENTS_COST)
    if checkpoints.ttl_seconds is not None:
        key = f"checkpoints.ttl_seconds {checkpoints.ttl_seconds}"
        yield ServiceNeed("ttl", key, "leave that out, and give checkpoints.keep")
    tolerance = checkpoints.probe_tolerance
    if tolerance is not None:
        key = f"checkpoints.probe_tolerance {tolerance:g}"
        larger = f"give a larger one, if measures by the sampler may be that rough, or {other}"
        for name in SAMPLER_FINDINGS:
            yield ServiceNeed(name, key, larger, most=max(tolerance, ROUGH))
        yield ServiceNeed("company", key, other, most=tolerance, cost=ROUGH_COST)


def _of_training(recipe: RunRecipe) -> Iterator[ServiceNeed]:
    for term in recipe.update_method().terms(0):
        if term.service_loss().name in CLIPPING:
            key = f"the loss {term.loss}"
            yield ServiceNeed("clip", key, "give another loss, or use another service")
    if recipe.optimizer.grad_clip_norm > 0:
        key = f"optimizer.grad_clip_norm {recipe.optimizer.grad_clip_norm:g}"
        yield ServiceNeed("grad_clip", key, "leave it out, and give a smaller learning rate")
    if isinstance(recipe, FinetuneRecipe) and recipe.teacher.model is not None:
        key = f"teacher.top_k {recipe.teacher.top_k}"
        yield ServiceNeed("targets", key, "learn from the texts alone, or use another service")


def _of_scores(recipe: RunRecipe) -> Iterator[ServiceNeed]:
    if isinstance(recipe, Recipe):
        yield ServiceNeed("seeds", f"seed {recipe.seed}", "use another service", cost=SEEDS_COST)
    for key in _scored_by(recipe):
        yield ServiceNeed("prompt_logprobs", key, "leave it out, or use another service")
    if isinstance(recipe, FinetuneRecipe) and recipe.teacher.model is not None:
        local = "://" not in recipe.teacher.model
        if local:
            key = f"teacher.model {recipe.teacher.model}"
            yield ServiceNeed("likeliest", key, "learn from the texts alone")


def _scored_by(recipe: RunRecipe) -> Iterator[str]:
    """Yield the keys by which a sampler of the service scores what it has not sampled."""
    if isinstance(recipe, Recipe):
        if recipe.algorithm.kl.coefficient > 0:
            yield f"algorithm.kl.coefficient {recipe.algorithm.kl.coefficient:g}"
        if any("://" not in model for model in recipe.teachers().models.values()):
            yield "algorithm.teacher.models"
    elif recipe.holds_out():
        yield "dataset.held_out"
    if isinstance(recipe, PreferRecipe) and recipe.preference.row().reference:
        yield f"preference.reference {recipe.preference.reference}"
