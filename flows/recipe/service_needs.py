"""What a recipe needs of its service, by the key that asks for it, and what a service offers.

A service is probed once a process, and what is found is recorded in the run's folder.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tinker

from ratchet.adapters.diagnosis.bench import ROUGH, Finding
from ratchet.adapters.diagnosis.probes import TITLES, Diagnosis, examine
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.tinker.engines import service_url
from ratchet.adapters.tinker.service import Service, ServiceRefused, connect
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
from ratchet.tasks.reports.tables import fitted
from ratchet.tasks.settings.run import Model
from ratchet.tasks.storage.files import is_written, read_json, write_json
from ratchet.tasks.storage.run_folder import UNTRAINED_FOLDERS, RunFolder

NOT_MISSED = ("offers", "unknown")
"""Verdicts by which a run goes on: what is not known is taken for offered."""
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
DOCTORS_PATIENCE = 30.0
FINDING_COLUMNS = ["what", "found", "expected", "measured"]
ROUGH_COST = f"what a crash rebuilds is compared within {WIDER:g} times that"
END_COST = "the training clients of a session that has ended may keep their places"

_known: dict[tuple[str, str, str], dict[str, Finding]] = {}
"""Findings of this process, by URL, base model and SDK: several runs ask one service once."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceNeed:
    """One thing that a recipe needs: the finding that tells of it, and the key that asks for it.

    If the finding's value is known, it may be at most `most`. With a `cost`, a run only logs that.
    """

    finding: str
    key: str
    remedy: str
    most: float | None = None
    cost: str = ""

    def is_met(self, found: Finding) -> bool:
        """Return whether a finding is what the recipe needs."""
        if self.most is not None and found.value is not None:
            return found.value <= self.most
        return found.verdict in NOT_MISSED


@dataclass(frozen=True)
class Unmet:
    """A need that a service does not meet, with what was found."""

    need: ServiceNeed
    found: Finding

    def fact(self) -> str:
        """Say what is needed by which key, and what came of it."""
        found = self.found
        does = "does not honour" if found.verdict == "LIES" else "lacks"
        expected = f"expected {found.expected}, got " if found.expected else ""
        came = f"{expected}{found.measured}"
        return f"it {does} {TITLES[found.name]}, which {self.need.key} needs ({came})"

    def describe(self) -> str:
        return f"{self.fact()}; {self.need.remedy}"


def needs(recipe: RunRecipe) -> list[ServiceNeed]:
    return [*_always(recipe), *_of_training(recipe), *_of_scores(recipe)]


def unmet(recipe: RunRecipe, diagnosis: Diagnosis) -> list[Unmet]:
    """List the needs of a recipe that a service does not meet."""
    known = [(need, diagnosis.of(need.finding)) for need in needs(recipe)]
    lacking = [Unmet(need, found) for need, found in known if found and not need.is_met(found)]
    refused = {one.found.name for one in lacking if not one.need.cost}
    return [one for one in lacking if not one.need.cost or one.found.name not in refused]


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
    if (teachers := recipe.teachers()).likeliest and teachers.models:
        key = f"teacher.top_k {teachers.likeliest}"
        yield ServiceNeed("targets", key, "learn from the texts alone, or use another service")


def _of_scores(recipe: RunRecipe) -> Iterator[ServiceNeed]:
    if recipe.plays_rollouts:
        yield ServiceNeed("seeds", f"seed {recipe.seed}", "use another service", cost=SEEDS_COST)
    for key in recipe.scored_by():
        yield ServiceNeed("prompt_logprobs", key, "leave it out, or use another service")
    teachers = recipe.teachers()
    for model in teachers.models.values() if teachers.likeliest else ():
        if "://" not in model:
            yield ServiceNeed("likeliest", f"{teachers.key} {model}", "learn from the texts alone")


def probe_service(recipe: RunRecipe, run: RunFolder, service: Service) -> None:
    """Probe what a recipe needs of its service; refuse what it lacks.

    The engine that a run has started is that of this version, which the tests of it probe.
    """
    trains = run.path.parent.name not in UNTRAINED_FOLDERS
    if service.server.process is not None or not trains:
        return
    diagnosis = _recorded(run, recipe) or _probe(recipe, run, service)
    lacking = unmet(recipe, diagnosis)
    for one in lacking:
        if one.need.cost:
            fact, cost = one.fact(), one.need.cost
            log.warning("of the Tinker service at %s: %s. So %s", diagnosis.url, fact, cost)
    if refused := [one for one in lacking if not one.need.cost]:
        said = ". ".join(one.describe() for one in refused)
        raise ServiceRefused(
            f"the Tinker service at {diagnosis.url} cannot train this recipe: {said}. "
            "`ratchet doctor` shows what it offers"
        )


def may_offer(run: RunFolder, finding: str) -> bool:
    """Return whether a run's service offers something, such as seeds, as far as it is known."""
    found = read_diagnosis(run).get(finding)
    return found is None or found.verdict in NOT_MISSED


def tolerance_of(recipe: RunRecipe, run: RunFolder) -> float | None:
    """Return how far rebuilt weights may be off what is recorded; None is no bound.

    It is the recipe's own bound or, if that is larger, what the service's precision asks for.
    """
    own, found = recipe.checkpoints.probe_tolerance, read_diagnosis(run)
    off = [found[name].value or 0.0 for name in SAMPLER_FINDINGS if name in found]
    return None if own is None else max([own, *(WIDER * one for one in off)])


def read_diagnosis(run: RunFolder) -> dict[str, Finding]:
    """Read the findings of a run's service by their names; there are none of its own engine."""
    if not is_written(run.service):
        return {}
    return {row["name"]: Finding(**row) for row in read_json(run.service)["findings"]}


def _recorded(run: RunFolder, recipe: RunRecipe) -> Diagnosis | None:
    """Return what is recorded of this very service, if it is all that the recipe needs."""
    if not is_written(run.service):
        return None
    recorded, found, asked = read_json(run.service), read_diagnosis(run), _asked(recipe)
    same = (recorded["url"], recorded["base"], recorded["sdk"]) == _key(recipe)
    if not same or not asked <= found.keys():
        return None
    return Diagnosis(*_key(recipe), tuple(found.values()), 0.0, 0)


def _probe(recipe: RunRecipe, run: RunFolder, service: Service) -> Diagnosis:
    key = _key(recipe)
    known, asked = _known.setdefault(key, {}), _asked(recipe)
    made = examine(service, recipe.model.base, asked - known.keys(), strict=True)
    known |= {one.name: one for one in made.findings}
    wanted = tuple(one for name, one in known.items() if name in asked)
    diagnosis = Diagnosis(*key, wanted, made.seconds, made.tokens)
    write_json(run.service, asdict(diagnosis))
    return diagnosis


def _asked(recipe: RunRecipe) -> set[str]:
    """Return what is probed: what the recipe needs; of hosted Tinker, the precision alone.

    What hosted Tinker does with a field is what the API means by it.
    """
    named = {need.finding for need in needs(recipe)}
    return named if os.environ.get("TINKER_BASE_URL") else named & {*SAMPLER_FINDINGS}


def _key(recipe: RunRecipe) -> tuple[str, str, str]:
    """Return what findings are of; the address is not that of a bridge, which each start has."""
    return service_url(), recipe.model.base, tinker.__version__


@dataclass(frozen=True)
class Examined:
    """A diagnosis of a service and, if a recipe is to be trained there, what it does not meet."""

    diagnosis: Diagnosis
    recipe: str | None
    lacking: tuple[Unmet, ...]

    @classmethod
    def ask(
        cls, name: str | None, overrides: Sequence[str], url: str | None, base: str | None
    ) -> "Examined":
        """Probe the service at a URL, or that of the environment, or an engine started for it."""
        recipes = [] if name is None else _recipes(name, overrides)
        if url is not None:
            os.environ["TINKER_BASE_URL"] = url
        if base is None and recipes:
            base = recipes[0].model.base
        diagnosis = diagnose(base)
        lacking = [one for recipe in recipes for one in unmet(recipe, diagnosis)]
        return cls(diagnosis, name, tuple(dict.fromkeys(lacking)))

    @property
    def refuses(self) -> bool:
        """Whether a run of the recipe would be refused."""
        return any(not one.need.cost for one in self.lacking)

    def table(self, width: int) -> str:
        """Return the findings as a table, below a line of what they are of and what they took."""
        made = self.diagnosis
        took = f"{made.seconds:.1f} s and {counted(made.tokens, 'token')}"
        rows = [
            [TITLES[one.name], one.verdict, one.expected, one.measured] for one in made.findings
        ]
        table = fitted(FINDING_COLUMNS, rows, width, FINDING_COLUMNS[2:])
        return f"{made.url}, {made.base}, by SDK {made.sdk}, in {took}\n\n{table}"

    def verdict(self) -> str:
        """Say what of the recipe the service forbids, and what a run would do without."""
        if self.recipe is None:
            return ""
        can = "cannot" if self.refuses else "can"
        said = [
            f"{one.fact()}; a run goes on without it: {one.need.cost}"
            if one.need.cost
            else one.describe()
            for one in sorted(self.lacking, key=lambda one: one.need.cost != "")
        ]
        return "\n- ".join([f"\n{self.recipe} {can} be trained there", *said])

    def record(self) -> dict[str, Any]:
        """Return the diagnosis, and what of the recipe it forbids, as JSON."""
        return {
            **asdict(self.diagnosis),
            "recipe": self.recipe,
            "refuses": self.refuses,
            "unmet": [asdict(one) for one in self.lacking],
        }


def diagnose(base: str | None) -> Diagnosis:
    """Probe the service of the environment, or else an engine that is started for it.

    Without a base model it is that of a recipe which names none, or else the service's first.
    """
    asked = base or Model().base
    Model(base=asked).check_service()
    with (
        TemporaryDirectory(prefix="ratchet-doctor-") as state,
        connect(asked, Path(state), DOCTORS_PATIENCE) as service,
    ):
        named = asked if base else _first_model(service, asked)
        made = examine(service, named)
    return replace(made, url=os.environ.get("TINKER_BASE_URL") or made.url)  # not a bridge's own


def _recipes(name: str, overrides: Sequence[str]) -> Sequence[RunRecipe]:
    recipe = named_recipe(name, overrides, FlowRecipe)
    if trained := recipe.trained():
        return trained
    raise UserError(f"{name} is a {recipe.flow}; give the recipe whose keys it varies")


def _first_model(service: Service, default: str) -> str:
    """Return the default base if the service has it, or else its first model."""
    asked = service.rest().get_server_capabilities()
    models = service.result(asked, "the models it has").supported_models
    names = [one.model_name for one in models if one.model_name]
    return default if default in names or not names else names[0]
