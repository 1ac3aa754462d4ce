"""Ratchet as a library: train an agent's model, and read what a run has recorded.

A recipe has a name in prefect.yaml, or is a YAML file; `train`, `replay` and `evaluate` are Prefect
flows that take it. `Run` opens what they left on disk, while it is being trained too. Every error
that a user can mend is a `UserError`, whose tree `ratchet.adapters.errors` describes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratchet.adapters.errors import UserError
    from ratchet.flows.evaluate import evaluate
    from ratchet.flows.recipe.loading import named_recipe as recipe
    from ratchet.flows.recipe.recipe import Recipe
    from ratchet.flows.replay import replay
    from ratchet.flows.train import train
    from ratchet.run import Run, runs
    from ratchet.tasks.checkpoints import Checkpoint
    from ratchet.tasks.recording.scores import Score

__all__ = [
    "Checkpoint",
    "Recipe",
    "Run",
    "Score",
    "UserError",
    "evaluate",
    "recipe",
    "replay",
    "runs",
    "train",
]
_HOMES = {
    "Checkpoint": "tasks.checkpoints:Checkpoint",
    "Recipe": "flows.recipe.recipe:Recipe",
    "Run": "run:Run",
    "Score": "tasks.recording.scores:Score",
    "UserError": "adapters.errors:UserError",
    "evaluate": "flows.evaluate:evaluate",
    "recipe": "flows.recipe.loading:named_recipe",
    "replay": "flows.replay:replay",
    "runs": "run:runs",
    "train": "flows.train:train",
}
"""Name of the library → the module that has it, which is imported when the name is first used."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
