"""Checkpoints of other runs that a run is bound to: where its weights start, and its references.

They are bound when the run is made: its manifest has their addresses and what they were, and the
run's engine has their weights. The run needs the other runs no more.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from adapters.calls import POLICY
from adapters.errors import UserError
from adapters.tinker.bases import name_for_clients
from adapters.tinker.engines import needs_engine, saved_files
from flows.recipe.algorithm import BASE
from flows.recipe.loading import read_lineage, read_recipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import Model, RunRecipe
from tasks.checkpoints import Ledger, held_out_by_step, read_checkpoint
from tasks.storage.files import is_written, link_or_copy
from tasks.storage.manifest import Eras, read_manifest
from tasks.storage.run_folder import RunFolder, folder_of

if TYPE_CHECKING:  # they import torch, which takes seconds
    from adapters.tinker.service import PatientSampler, Service
    from tasks.recovery.recorded_steps import Start

START = "model.start"


class CheckpointRefused(UserError):
    """Refusal of a checkpoint of another run, for what the recipe needs it for."""


class SavedPolicy(BaseModel, frozen=True):
    """Addresses of a policy's weights and, if it was saved, of its training state."""

    sampler: str
    state: str | None
    optimizer_steps: int | None = None
    """Steps that the optimizer in the state has taken; None if nobody needs to know."""


class BoundCheckpoint(BaseModel, frozen=True):
    """A checkpoint of another run as it was when a run was bound to it.

    `created` tells the other run from a later one of its name. `held_out` is the checkpoint's
    reward or loss, if it was scored.
    """

    run: str
    step: int
    created: str
    model: dict[str, Any]
    held_out: float | None
    policies: dict[str, SavedPolicy]

    def of(self, policy: str) -> SavedPolicy:
        """Return the policy of this name, or else the main one."""
        return self.policies.get(policy, self.policies[POLICY])


def bind_checkpoints(recipe: RunRecipe, known: Mapping[str, Any]) -> dict[str, Any]:
    """Describe each checkpoint of another run that a recipe names, as a manifest has it.

    Those that are `known` are taken as they are. Raises CheckpointRefused or CheckpointError if
    there is none, or if it is not what the recipe needs.
    """
    model = recipe.model
    if model.names_state() and needs_engine(model.base):
        raise CheckpointRefused(
            f"{START} {model.start} is a path of a Tinker service, and the model is trained on an "
            "engine of the run's own; give RUN@STEP, or set TINKER_BASE_URL or TINKER_API_KEY"
        )
    return {
        name: known.get(name) or _find(key, name, recipe).model_dump()
        for key, name in recipe.named_checkpoints().items()
    }


def carry_weights(recipe: RunRecipe, folder: RunFolder) -> None:
    """Put the weights that a run is bound to into its engine, which has still to be started."""
    if not needs_engine(recipe.model.base):
        return
    for key, name in recipe.named_checkpoints().items():
        bound = read_bound(folder, name)
        parent = folder_of(bound.run)
        known = parent.exists() and read_manifest(parent)["created"] == bound.created
        for address in _addresses(bound):
            for path in saved_files(parent.engine, address) if known else ():
                target = folder.engine / path.relative_to(parent.engine)
                if not is_written(target):
                    link_or_copy(path, target)
            if not saved_files(folder.engine, address):
                raise CheckpointRefused(
                    f"{key} {name} is gone: {parent.path} has no weights {address}, as it had when "
                    "the run was made; put them back, or train a new run"
                )


def carried_files(folder: RunFolder) -> list[Path]:
    """List the files of weights that the engine of a run has from other runs."""
    names = read_manifest(folder).get("bound", {})
    return [
        path
        for name in names
        for address in _addresses(read_bound(folder, name))
        for path in saved_files(folder.engine, address)
    ]


def read_bound(folder: RunFolder, name: str) -> BoundCheckpoint:
    """Read what a run's manifest says of a checkpoint that it is bound to."""
    bound = read_manifest(folder).get("bound", {})
    if name not in bound:
        raise CheckpointRefused(
            f"{folder.manifest} does not say which checkpoint {name} is; continue the run with the "
            "version that wrote it, or train a new run"
        )
    return BoundCheckpoint.model_validate(bound[name])


def find_start(recipe: RunRecipe, folder: RunFolder, policy: str) -> "Start | None":
    """Return the training state from which a policy of a run starts; None for an untrained one."""
    from tasks.recovery.recorded_steps import Start

    model = recipe.model
    if model.start is None:
        return None
    if model.names_state():
        return Start(model.start, model.start_optimizer)
    saved = read_bound(folder, model.start).of(policy)
    assert saved.state is not None, "a start is bound with its state"
    return Start(saved.state, model.start_optimizer, saved.optimizer_steps)


def check_state(model: Model, service: "Service") -> None:
    """Refuse (CheckpointRefused) a start at a path of the service that has another shape."""
    if model.start is None or not model.names_state():
        return
    found = service.describe_weights(model.start)
    asked = {
        "base_model": name_for_clients(model.base),
        "lora_rank": model.lora_rank,
        "train_attn": model.train_attention,
        "train_mlp": model.train_mlp,
        "train_unembed": model.train_unembedding,
    }
    for key, value in asked.items():
        if (was := getattr(found, key)) not in (None, value):
            raise CheckpointRefused(
                f"{START} {model.start} has {key} {was}, and the recipe asks for {value}; give "
                "the same"
            )


def open_reference(
    recipe: Recipe, folder: RunFolder, service: "Service"
) -> "PatientSampler | None":
    """Return the policy from which the penalty measures the divergence; None without a penalty."""
    from adapters.rendering.chat import fingerprint  # imports the renderers

    divergence, base = recipe.algorithm.kl, recipe.model.base
    name = divergence.reference
    if divergence.penalty() is None:
        return None
    if divergence.names_checkpoint():
        return service.sampler(read_bound(folder, name).of(POLICY).sampler)
    if name == BASE:
        return service.base_sampler(base)
    reference = service.base_sampler(name)
    tokenizer = service.tokenizer_of(service.base_sampler(base))
    if fingerprint(service.tokenizer_of(reference)) != fingerprint(tokenizer):
        raise CheckpointRefused(
            f"algorithm.kl.reference {name} has other tokens than {base}; give a model of the same "
            "family, or base"
        )
    return reference


def _find(key: str, name: str, recipe: RunRecipe) -> BoundCheckpoint:
    run, asked = read_checkpoint(name)
    parent = folder_of(run)
    if not parent.exists():
        raise CheckpointRefused(
            f"{key} {name} names no run ({parent.path} is not there); give RUN@STEP of a run that "
            f"`ratchet runs` lists{'' if key == START else ', base, or a model by its whole name'}"
        )
    trained = read_recipe(parent)
    if trained.model.base != recipe.model.base:
        raise CheckpointRefused(
            f"{key} {name} is a checkpoint of {trained.model.base}, and the policy is "
            f"{recipe.model.base}; give a checkpoint of that model"
        )
    step = Ledger(parent.checkpoints(POLICY)).at(asked).step
    if key == START:
        _check_start(name, step, parent, trained.model, recipe.model)
    counted = key == START and recipe.model.start_optimizer
    policies = {}
    for policy in trained.policies():
        saved = Ledger(parent.checkpoints(policy)).at(step)
        taken = _optimizer_steps(trained, parent, policy, step) if counted else None
        state = saved.state if key == START else None
        policies[policy] = SavedPolicy(sampler=saved.sampler, state=state, optimizer_steps=taken)
    return BoundCheckpoint(
        run=run,
        step=step,
        created=read_manifest(parent)["created"],
        model=trained.model.model_dump(mode="json"),
        held_out=held_out_by_step(parent)[1].get(step),
        policies=policies,
    )


def _check_start(name: str, step: int, parent: RunFolder, trained: Model, model: Model) -> None:
    """Refuse a start of another shape, without a training state, or with another renderer."""
    shape = ("lora_rank", "train_attention", "train_mlp", "train_unembedding", "renderer")
    for key in shape:
        was, asked = getattr(trained, key), getattr(model, key)
        if was != asked:
            raise CheckpointRefused(
                f"{START} {name} was trained with model.{key} {was}, and the recipe has {asked}; "
                "give the same"
            )
    ledger = Ledger(parent.checkpoints(POLICY))
    if ledger.at(step).state is None:
        having = sorted({saved.step for saved in ledger.checkpoints() if saved.state})
        raise CheckpointRefused(
            f"{START} {name}: checkpoint {step} was saved without its training state; those of "
            f"{parent.name} with one are {', '.join(map(str, having))}"
        )


def _optimizer_steps(recipe: RunRecipe, parent: RunFolder, policy: str, step: int) -> int | None:
    from tasks.recovery.recorded_steps import count_optimizer_steps  # imports torch

    recipes, start = read_lineage(parent, recipe), find_start(recipe, parent, policy)
    methods = Eras(tuple((first, made.update_method()) for first, made in recipes.begun))
    return count_optimizer_steps(parent, policy, start, methods, step)


def _addresses(bound: BoundCheckpoint) -> Iterator[str]:
    for saved in bound.policies.values():
        yield saved.sampler
        if saved.state is not None:
            yield saved.state
