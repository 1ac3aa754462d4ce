"""The service of a run: what its recipe needs is probed once, and recorded in the run's folder."""

import logging
import os
from dataclasses import asdict

import tinker

from ratchet.adapters.diagnosis.bench import Finding
from ratchet.adapters.diagnosis.examination import HOSTED, Diagnosis, examine
from ratchet.adapters.tinker.service import Service, ServiceRefused
from ratchet.flows.diagnosis.needs import SAMPLER_FINDINGS, WIDER, needs, unmet
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.storage.files import is_written, read_json, write_json
from ratchet.tasks.storage.run_folder import UNTRAINED_FOLDERS, RunFolder

_known: dict[tuple[str, str, str], dict[str, Finding]] = {}
"""Findings of this process, by URL, base model and SDK: several runs ask one service once."""

log = logging.getLogger(__name__)


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


def keeps_optimizer(run: RunFolder) -> bool:
    """Return whether saved states have the optimizer's moments, as far as it is known."""
    found = read_diagnosis(run).get("optimizer")
    return found is None or found.verdict in ("offers", "unknown")


def obeys_seeds(run: RunFolder) -> bool:
    """Return whether the service samples by seeds, as far as it is known."""
    found = read_diagnosis(run).get("seeds")
    return found is None or found.verdict in ("offers", "unknown")


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
    url = os.environ.get("TINKER_BASE_URL") or HOSTED
    return url, recipe.model.base, tinker.__version__
