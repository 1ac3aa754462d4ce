"""Names of weights, as users write them: each is read here, and nowhere else.

A checkpoint is RUN, RUN@STEP, RUN@best, RUN:POLICY@STEP or a promoted name; other weights are an
exported folder, or a base model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ratchet.adapters.calls import POLICY, Sampling
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.bases import check_base
from ratchet.adapters.tinker.engines import check_reachable, needs_engine
from ratchet.adapters.tinker.known_models import KNOWN
from ratchet.adapters.weights.adapter import is_adapter, is_model, read_base
from ratchet.flows.recipe.loading import read_recipe
from ratchet.flows.recipe.plan import BEST
from ratchet.flows.recipe.run_recipe import MOST_TOKENS, RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.comparison.promotions import (
    Promotion,
    check_name,
    find_promotion,
    record_promotion,
)
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.settings.rollouts import Rollouts
from ratchet.tasks.settings.run import Model
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of


@dataclass(frozen=True)
class CheckpointName:
    """Name of a checkpoint: RUN, RUN@STEP, RUN@best, or a promoted name.

    RUN or the promoted name may have a policy, as in RUN:POLICY; `policy` is empty without one. The
    step is None for the run's last checkpoint.
    """

    run: str
    policy: str
    step: int | None

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name; RunError or UserError if no checkpoint can have it."""
        run, policy, step = split_name(name)
        if step is not None:
            return cls(run, policy, read_step(run, step))
        if (found := find_promotion(run)) is not None:
            return cls(found.run, policy, found.step)
        return cls(run, policy, None)

    @property
    def folder(self) -> RunFolder:
        return folder_of(self.run)

    @property
    def title(self) -> str:
        """Name without its step: RUN, or RUN:POLICY."""
        return f"{self.run}:{self.policy}".removesuffix(":")

    @property
    def saved_step(self) -> int:
        """Step of the checkpoint; UserError if the run has not saved it."""
        return Ledger(self.folder.checkpoints(self.policy or POLICY)).at(self.step).step

    def check_whole(self, name: str) -> None:
        """Refuse (UserError) the `name` of one policy, where all of a checkpoint's are needed."""
        if self.policy:
            raise UserError(f"{name} is one policy of a run; name the run's checkpoint RUN@STEP")

    def check_policy(self, trained: Iterable[str], key: str = "") -> None:
        """Refuse (UserError) a policy that the run has not trained."""
        there = [*trained]
        if self.policy and self.policy not in there:
            raise UserError(
                f"{key and f'{key}: '}{self.folder.path} trains no policy {self.policy}; it trains "
                f"{', '.join(there)}"
            )


def split_name(name: str) -> tuple[str, str, str | None]:
    """Split RUN:POLICY@STEP; the policy is empty, and the step None, if the name has none."""
    named, at, step = name.partition("@")
    run, _, policy = named.partition(":")
    return run, policy, step if at else None


def read_step(run: str, step: str) -> int:
    """Read the number of a run's checkpoint, or `best`.

    UserError if nothing says which checkpoint is best.
    """
    if step == BEST:
        folder = folder_of(run)
        read_manifest(folder)  # refuses a run that does not exist
        return best_step(folder)
    if not (step.isascii() and step.isdecimal()):
        raise RunError(
            f"'{run}@{step}' names no checkpoint; RUN@STEP does, such as {run}@10, and so does "
            f"{run}@{BEST}"
        )
    return int(step)


def promote(checkpoint: str, name: str) -> tuple[Promotion, Promotion | None]:
    """Give a checkpoint a name; return what the name means, and what it meant before.

    UserError if the checkpoint does not exist, or if the name means something else.
    """
    check_name(name)
    named = CheckpointName.parse(checkpoint)
    named.check_whole(checkpoint)
    created = read_manifest(named.folder)["created"]
    promotion = Promotion(name=name, run=named.run, step=named.saved_step, created=created)
    return promotion, record_promotion(promotion)


def best_step(run: RunFolder) -> int:
    """Return the checkpoint that is best on held-out examples, of equals the earliest.

    UserError if no checkpoint is scored.
    """
    values = read_facts(run).held_out
    if not values.by_step:
        raise UserError(
            f"{run.path} has scored no checkpoint on held-out examples, so that none is known as "
            f"the best; give a step, such as {run.name}@10"
        )
    return values.best


@dataclass(frozen=True)
class Weights:
    """Weights to serve: a base model's or, with a `run`, a checkpoint's."""

    name: str
    model: Model
    defaults: Sampling
    """Sampling for clients that name no numbers."""
    run: RunFolder | None = None
    policy: str = POLICY
    step: int = 0
    adapter: Path | None = None
    """Folder of an exported adapter on the base."""


def find_weights(name: str) -> Weights:
    """Find RUN, RUN@STEP, RUN:POLICY@STEP, an exported folder, or a base model.

    A base model's name has a slash or is known. A run hides a folder of its name.

    STEP may be `best`. UserError if the name means no weights.
    """
    check_reachable()
    place, defaults = Path(name), Rollouts(max_tokens=MOST_TOKENS).sampling()
    if is_adapter(place) and not _names_run(name):
        base = read_base(place)
        if not needs_engine(base):
            raise UserError(
                f"{name} is an adapter, which an engine of this machine alone serves; unset "
                "TINKER_BASE_URL and TINKER_API_KEY"
            )
        check_base(base)
        return Weights(name, Model(base=base), defaults, adapter=place)
    if "/" in name or name in KNOWN or (is_model(place) and not _names_run(name)):
        base = str(place.resolve()) if is_model(place) else name
        check_base(base)
        return Weights(name, Model(base=base), defaults)
    named = CheckpointName.parse(name)
    folder = named.folder
    recipe = read_recipe(folder)
    named.check_policy(recipe.policies())
    step = named.saved_step
    name = f"{named.title}@{step}"
    return Weights(name, recipe.model, recipe.sampling(), folder, named.policy or POLICY, step)


def _names_run(name: str) -> bool:
    return "/" not in name and folder_of(name).exists()


def find_awaited(recipe: RunRecipe, awaited: Mapping[str, RunRecipe]) -> dict[str, dict[str, str]]:
    """Map the checkpoints of awaited runs that a recipe names to those runs.

    Refuse (RunError) a checkpoint that a run, when it has finished, will not have.
    """
    found: dict[str, dict[str, str]] = {}
    for name, key in recipe.named_checkpoints().items():
        run, policy, step = split_name(name)
        if (trained := awaited.get(run)) is None:
            continue
        policies, steps = trained.policies(), trained.steps
        known = step in (None, BEST) or (
            step.isdecimal()
            and (not steps or int(step) <= steps)
            and trained.checkpoints.keeps(int(step), steps)
        )
        if not known or (policy and policy not in policies):
            raise RunError(
                f"{key} {name}: that run will keep checkpoints of the steps 0 to "
                f"{steps or 'its last'}, as its checkpoints.keep says, of {', '.join(policies)}; "
                f"give one of them, by its step or as @{BEST}"
            )
        found[name] = {"run": run}
    return found
