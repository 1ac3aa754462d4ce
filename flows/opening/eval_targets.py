"""Targets of an evaluation: a checkpoint of a run, the base model, or a model of LiteLLM."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Self

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.names import CheckpointName
from ratchet.flows.opening.checks import check_start
from ratchet.flows.recipe.loading import count_steps, read_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.settings.algorithm import BASE
from ratchet.tasks.settings.rollouts import Evaluation, Rollouts
from ratchet.tasks.settings.run import Model, Tracking
from ratchet.tasks.storage.manifest import changed_files, latest_run
from ratchet.tasks.storage.run_folder import folder_of, name_run

UNPLAYED = {
    "rollouts": ("groups", "group_size", "rounds", "batches", "lag", "stream", "attempts"),
    "evaluation": ("every",),
}
"""Keys of sections by which no held-out rollout is played otherwise."""
PLAYING_KEYS = ("agent", "roles", "dataset", "rollouts", "evaluation", "seed")
"""Keys of a recipe that, beside the weights, make the rollouts of an evaluation."""


@dataclass(frozen=True)
class EvalTarget:
    """A checkpoint of a run: the run, the recipe it is bound to, and the step (None: the last).

    `requested` is the bound recipe with the requested evaluation or, if the run does not play the
    agent, the agent's recipe with the run's model. `model` names a base model or LiteLLM's.
    """

    run: str
    bound: RunRecipe
    requested: Recipe
    step: int | None
    model: str | None = None

    @property
    def title(self) -> str:
        """Name of the target: RUN@STEP, or the model."""
        return f"{self.run}@{self.checkpoint}" if self.model is None else self.model

    @property
    def checkpoint(self) -> int:
        """Number of the checkpoint; UserError if the run does not have it."""
        if self.model is not None:
            return 0
        return Ledger(folder_of(self.run).checkpoints(POLICY)).at(self.step).step

    @property
    def file(self) -> Path:
        return folder_of(self.run).evaluation(f"{self.checkpoint:05d}{self.tag}")

    @cached_property
    def tag(self) -> str:
        """Suffix of the names of played shards; empty where the run plays the same itself."""
        run, played = folder_of(self.run), self.requested.fingerprint()
        changed = changed_files(run, self.requested.checksums(run)) if run.exists() else {}
        if changed:  # since the run has had these files
            played = sha256(f"{played} {sorted(changed.items())}".encode()).hexdigest()
        return f".{played[:6]}" if changed or self.requested != self.bound else ""

    @classmethod
    def find(
        cls,
        recipe: Recipe,
        run: str | None,
        step: int | None,
        model: str | None,
        as_given: bool = False,
    ) -> Self:
        """Find the target that the arguments of `flows.evaluate` name."""
        if model is None:
            return cls._of_run(recipe, run, step, as_given)
        if run is not None or step is not None:
            raise UserError(
                f"--model {model} says who is evaluated, and so do --run and --checkpoint; give "
                "one of them: --model RUN@STEP is a run's checkpoint"
            )
        if model in (BASE, recipe.model.base):
            return cls._alone(count_steps(recipe), BASE)
        if "/" in model:
            answered = {
                "model": Model(),
                "roles": {**recipe.roles, POLICY: model},
                "evaluation": recipe.evaluation.model_copy(update={"greedy": False}),
            }
            return cls._alone(count_steps(recipe).model_copy(update=answered), model)
        named = CheckpointName.parse(model)
        named.check_whole(model)
        return cls._of_run(recipe, named.run, named.step, as_given)

    @classmethod
    def _of_run(cls, recipe: Recipe, run: str | None, step: int | None, as_given: bool) -> Self:
        found = folder_of(run) if run else latest_run(recipe.agent, recipe.answerers)
        bound = read_recipe(found)
        if isinstance(bound, Recipe):
            recipe = _with_unplayed(recipe, bound)
        as_given |= isinstance(bound, Recipe) and recipe.agent != bound.agent
        other = any(getattr(recipe, key) != getattr(bound, key, None) for key in PLAYING_KEYS)
        if isinstance(bound, Recipe) and not (as_given and other):
            role = recipe.evaluation.judge.role
            asked = {role: recipe.roles[role]} if role in recipe.roles else {}
            roles = {**bound.roles, **asked} if recipe.evaluation.judge.judges else bound.roles
            changed = {"evaluation": recipe.evaluation, "roles": roles}
            requested = bound.model_copy(update=changed)
        else:
            weights = bound.model.model_copy(update={"start": None, "start_optimizer": False})
            requested = count_steps(recipe).model_copy(update={"model": weights})
        if missing := sorted(requested.policies().keys() - bound.policies().keys()):
            raise UserError(
                f"{found.path} trains no policy {', '.join(missing)}, which {recipe.agent} needs; "
                "name a run that does"
            )
        return cls(found.name, bound, requested, step)

    @classmethod
    def _alone(cls, recipe: Recipe, model: str) -> Self:
        """Return a run of its own, whose checkpoint 0 is the base model."""
        plain = {"rollouts": Rollouts(), "evaluation": Evaluation(), "tracking": Tracking()}
        bound = _with_unplayed(recipe, recipe.model_copy(update=plain))
        name = name_run(recipe.subject, model, bound.fingerprint()[:8])
        return cls(f"evaluations/{name}", bound, bound, 0, model)


def _with_unplayed(recipe: Recipe, other: Recipe) -> Recipe:
    """Return a recipe with the tracking and the keys of UNPLAYED that another one has."""
    changed = {
        name: getattr(recipe, name).model_copy(
            update={key: getattr(getattr(other, name), key) for key in keys}
        )
        for name, keys in UNPLAYED.items()
    }
    return recipe.model_copy(update={**changed, "tracking": other.tracking})


def find_target(
    recipe: Recipe,
    run: str | None,
    checkpoint: int | None,
    model: str | None,
    as_given: bool = False,
) -> EvalTarget:
    """Find the target of an evaluation; UserError if it does not exist."""
    target = EvalTarget.find(recipe, run, checkpoint, model, as_given)
    folder = folder_of(target.run)
    check_start(target.bound, folder, trains=False)
    target.requested.check()
    target.requested.check_answering(target.bound, target.run)
    if folder.exists() and target.step is not None:
        Ledger(folder.checkpoints(POLICY)).at(target.step)
    return target
