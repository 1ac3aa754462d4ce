"""recipe → the policies of a run: each has its folder, its roles, its ledger and its learner."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tinker import AdamParams

from adapters.calls import POLICY, Policy
from adapters.tinker.service import Service
from flows.recipe import Recipe
from tasks.checkpoints import Ledger
from tasks.remaking import datums_of
from tasks.storage.run_folder import policy_folder, recipe_at
from tasks.updates import Learner, Lora, Method


@dataclass(frozen=True)
class Trained:
    """One policy of a run. All of them have checkpoint k when step k - 1 is done."""

    name: str
    roles: tuple[str, ...]
    """Whose calls train it, and no other's."""
    folder: Path
    """The run's own or, of another policy than the main one, `policies/<name>` in it."""
    learner: Learner

    @property
    def ledger(self) -> Ledger:
        return self.learner.ledger

    def at(self, step: int) -> Policy:
        """What is sampled after `step` updates; no span of it can be taken for the main one's."""
        checkpoint = self.ledger.at(step)
        return Policy(self.learner.sampler(checkpoint), f"{self.name}@{checkpoint.version}")


def policies_of(
    recipe: Recipe, folder: Path, service: Service, *, on_policy: bool
) -> tuple[Trained, ...]:
    """Those of the run in `folder`, the main one first; each has its checkpoint 0."""
    policies = tuple(
        Trained(
            name,
            roles,
            policy_folder(folder, name),
            _learner(recipe, folder, name, service, on_policy=on_policy),
        )
        for name, roles in recipe.policies().items()
    )
    for policy in policies:
        policy.learner.initial()
    return policies


def lora_seed(run_seed: int, name: str) -> int:
    """Of the main policy the run's; of another 31 bits, so that no two begin alike."""
    if name == POLICY:
        return run_seed
    return int(hashlib.sha256(f"{run_seed}/{name}".encode()).hexdigest()[:8], 16) >> 1


def _learner(
    recipe: Recipe, folder: Path, name: str, service: Service, *, on_policy: bool
) -> Learner:
    model, checkpoints = recipe.model, recipe.checkpoints

    def at(step: int) -> Recipe:
        return Recipe.model_validate(recipe_at(folder, step))

    return Learner(
        service,
        Ledger(policy_folder(folder, name) / "checkpoints.jsonl"),
        datums=lambda step: _datums(at(step), folder, name, step),
        lora=Lora(
            model.base,
            model.lora_rank,
            lora_seed(recipe.seed, name),
            train_attn=model.train_attention,
            train_mlp=model.train_mlp,
            train_unembed=model.train_unembedding,
        ),
        method=lambda step: _method(at(step)),
        ttl_seconds=checkpoints.ttl_seconds,
        probe_tolerance=checkpoints.probe_tolerance if on_policy else None,
    )


def _datums(recipe: Recipe, folder: Path, name: str, step: int) -> Path:
    algorithm = recipe.algorithm
    return datums_of(
        folder,
        step,
        algorithm.advantage,
        algorithm.normalise,
        recipe.rollouts.smallest_group(),
        algorithm.discount,
        recipe.policies()[name],
        policy_folder(folder, name),
    )


def _method(recipe: Recipe) -> Method:
    algorithm, optimizer = recipe.algorithm, recipe.optimizer
    return Method(algorithm.loss, algorithm.loss_settings, AdamParams(**optimizer.model_dump()))
