"""The reference policy of a run, from which its penalty measures the divergence."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapters.calls import POLICY
from adapters.errors import UserError
from adapters.tinker.engines import needs_engine, saved_files
from flows.recipe.algorithm import BASE
from flows.recipe.loading import read_recipe
from flows.recipe.recipe import Recipe
from tasks.checkpoints import Ledger
from tasks.storage.files import is_written, link_or_copy
from tasks.storage.json_files import read_json, write_json
from tasks.storage.run_folder import RunFolder, folder_of, read_checkpoint

if TYPE_CHECKING:  # they import torch, which takes seconds
    from adapters.tinker.service import PatientSampler, Service


class ReferenceRefused(UserError):
    """Refusal of a reference that cannot be compared with the policy."""


@dataclass(frozen=True)
class SavedReference:
    """Checkpoint of another run that is to be the reference: the run, and the sampler's address."""

    run: RunFolder
    sampler: str


def find_reference(name: str | None, base: str, folder: RunFolder) -> SavedReference | None:
    """Find the checkpoint `name` that a run is to be bound to; None if it needs none, or has one.

    Raises ReferenceRefused or CheckpointError if there is none, or if it is of another model than
    `base`.
    """
    if name is None or is_written(folder.reference):
        return None
    run, step = read_checkpoint(name)
    parent = folder_of(run)
    if not parent.exists():
        raise ReferenceRefused(
            f"algorithm.kl.reference {name} names no run ({parent.path} is not there); give "
            "RUN@STEP, base, or a model by a name with a slash"
        )
    trained = read_recipe(parent).model.base
    if trained != base:
        raise ReferenceRefused(
            f"algorithm.kl.reference {name} is a checkpoint of {trained}, and the policy is "
            f"{base}; give a checkpoint of that model, or base"
        )
    return SavedReference(parent, Ledger(parent.checkpoints(POLICY)).at(step).sampler)


def bind_reference(folder: RunFolder, reference: SavedReference, base_model: str) -> None:
    """Keep the address of the reference in a run, and its weights in the run's engine.

    The engine has still to be started. The run goes on without the other one from then on.
    """
    if needs_engine(base_model):
        parent = reference.run.engine
        for path in saved_files(parent, reference.sampler):
            target = folder.engine / path.relative_to(parent)
            if not is_written(target):
                link_or_copy(path, target)
    write_json(folder.reference, {"sampler": reference.sampler})


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
        return service.sampler(read_json(folder.reference)["sampler"])
    if name == BASE:
        return service.base_sampler(base)
    reference = service.base_sampler(name)
    tokenizer = service.tokenizer_of(service.base_sampler(base))
    if fingerprint(service.tokenizer_of(reference)) != fingerprint(tokenizer):
        raise ReferenceRefused(
            f"algorithm.kl.reference {name} has other tokens than {base}; give a model of the same "
            "family, or base"
        )
    return reference
