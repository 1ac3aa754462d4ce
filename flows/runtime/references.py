"""The reference policy of a run, from which its penalty measures the divergence."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapters.calls import POLICY
from adapters.errors import UserError
from adapters.tinker.engines import needs_engine
from flows.recipe.recipe import Recipe
from flows.runtime.eval_targets import BASE, read_checkpoint
from tasks.checkpoints import Ledger
from tasks.storage.files import is_written
from tasks.storage.json_files import read_json, write_json
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunFolder, folder_of

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from adapters.tinker.service import PatientSampler, Service


class ReferenceError(UserError):
    """Refusal of a reference that cannot be compared with the policy."""


@dataclass(frozen=True)
class SavedReference:
    """Checkpoint of another run that is to be the reference: the run, and the sampler's address."""

    run: RunFolder
    sampler: str


def find_reference(recipe: Recipe, folder: RunFolder) -> SavedReference | None:
    """Find the checkpoint that a run is to be bound to; None if it needs none, or has one.

    Raises ReferenceError or CheckpointError if there is none, or if it is of another base model.
    """
    name, base = recipe.algorithm.kl.reference, recipe.model.base
    if not recipe.algorithm.kl.names_checkpoint() or is_written(folder.reference):
        return None
    run, step = read_checkpoint(name)
    parent = folder_of(run)
    if not parent.exists():
        raise ReferenceError(
            f"algorithm.kl.reference {name} names no run ({parent.path} is not there); give "
            "RUN@STEP, base, or a model by a name with a slash"
        )
    trained = recipe_of(parent)["model"]["base"]
    if trained != base:
        raise ReferenceError(
            f"algorithm.kl.reference {name} is a checkpoint of {trained}, and the policy is "
            f"{base}; give a checkpoint of that model, or base"
        )
    ledger = Ledger(parent.checkpoints(POLICY))
    saved = ledger.at(ledger.last_step() if step is None else step)
    return SavedReference(parent, saved.sampler)


def bind_reference(folder: RunFolder, reference: SavedReference, base_model: str) -> None:
    """Keep the address of the reference in a run, and its weights in the run's engine.

    The engine has still to be started. The run goes on without the other one from then on.
    """
    from flows.runtime.forks import share_checkpoint  # imports Prefect, which is slow

    if needs_engine(base_model):
        share_checkpoint(reference.run, folder, reference.sampler)
    write_json(folder.reference, {"sampler": reference.sampler})


def open_reference(
    recipe: Recipe, folder: RunFolder, service: "Service", tokenizer: object
) -> "PatientSampler | None":
    """Return the reference; None if the recipe has no penalty."""
    from adapters.chat import fingerprint  # imports the renderers

    divergence, base = recipe.algorithm.kl, recipe.model.base
    name = divergence.reference
    if divergence.penalty() is None:
        return None
    if divergence.names_checkpoint():
        return service.sampler(read_json(folder.reference)["sampler"])
    if name == BASE:
        return service.base_sampler(base)
    reference = service.base_sampler(name)
    if fingerprint(service.tokenizer_of(reference)) != fingerprint(tokenizer):
        raise ReferenceError(
            f"algorithm.kl.reference {name} has other tokens than {base}; give a model of the same "
            "family, or base"
        )
    return reference
