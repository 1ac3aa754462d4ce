"""A service's diagnosis for people: a table, and what a recipe lacks there."""

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ratchet.adapters.diagnosis.examination import TITLES, Diagnosis, examine
from ratchet.adapters.errors import counted
from ratchet.adapters.tinker.service import Service, connect
from ratchet.flows.diagnosis.service import Unmet, needs, not_known, unmet
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.run_recipe import FlowError, FlowRecipe, RunRecipe
from ratchet.tasks.reports.tables import fitted
from ratchet.tasks.settings.run import Model

PATIENCE = 30.0
FINDING_COLUMNS = ["what", "found", "expected", "measured"]


@dataclass(frozen=True)
class Examined:
    """A diagnosis of a service and, if a recipe is to be trained there, what it does not meet."""

    diagnosis: Diagnosis
    recipe: str | None
    lacking: tuple[Unmet, ...]
    not_known: tuple[str, ...]
    """What the recipe needs and the service has not shown."""

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
        first = {need.finding for recipe in recipes for need in needs(recipe)}
        diagnosis = diagnose(base, first)
        lacking = [one for recipe in recipes for one in unmet(recipe, diagnosis)]
        unclear = [one.fact() for recipe in recipes for one in not_known(recipe, diagnosis)]
        return cls(diagnosis, name, tuple(dict.fromkeys(lacking)), tuple(dict.fromkeys(unclear)))

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
        refused = [one.describe() for one in self.lacking if not one.need.cost]
        borne = [
            f"{one.fact()}; a run goes on without it: {one.need.cost}"
            for one in self.lacking
            if one.need.cost
        ]
        as_known = ", as far as it is known" if self.not_known else ""
        head = f"\n{self.recipe} {can} be trained there{as_known}"
        return "\n".join([head, *(f"- {said}" for said in (*refused, *borne, *self.not_known))])

    def record(self) -> dict[str, Any]:
        """Return the diagnosis, and what of the recipe it forbids, as JSON."""
        return {
            **asdict(self.diagnosis),
            "recipe": self.recipe,
            "refuses": self.refuses,
            "unmet": [
                {
                    "finding": one.found.name,
                    "key": one.need.key,
                    "refuses": not one.need.cost,
                    "said": one.describe(),
                }
                for one in self.lacking
            ],
            "not_known": [*self.not_known],
        }


def diagnose(base: str | None, first: Collection[str] = ()) -> Diagnosis:
    """Probe the service of the environment, or else an engine that is started for it.

    The findings of `first` are made before the others, for which there may be no time.
    Without a base model it is that of a recipe which names none, or else the service's first.
    """
    asked = base or Model().base
    Model(base=asked).check_service()
    with (
        TemporaryDirectory(prefix="ratchet-doctor-") as state,
        connect(asked, Path(state), PATIENCE) as service,
    ):
        named = asked if base else _first_model(service, asked)
        made = examine(service, named, first=first)
    return replace(made, url=os.environ.get("TINKER_BASE_URL") or made.url)  # not a bridge's own


def _recipes(name: str, overrides: Sequence[str]) -> Sequence[RunRecipe]:
    recipe = named_recipe(name, overrides, FlowRecipe)
    if trained := recipe.trained():
        return trained
    raise FlowError(f"{name} is a {recipe.flow}; give the recipe whose keys it varies")


def _first_model(service: Service, default: str) -> str:
    """Return the default base if the service has it, or else its first model."""
    asked = service.rest().get_server_capabilities()
    models = service.result(asked, "the models it has").supported_models
    names = [one.model_name for one in models if one.model_name]
    return default if default in names or not names else names[0]
