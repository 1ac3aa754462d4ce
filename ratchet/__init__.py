"""Ratchet as a library: train an agent's model, and read what a run has recorded.

A recipe has a name in prefect.yaml, or is a YAML file; `train`, `replay` and `evaluate` are Prefect
flows that take it. `Run` opens what they left on disk, while it is being trained too. Every error
that a user can mend is a `UserError`, whose tree `adapters.errors` describes.
"""

import flows

if not hasattr(flows, "check_packages"):
    raise ImportError(
        f"Python finds {flows.__file__} in place of Ratchet's own package 'flows'; rename yours, "
        "or take its folder from the front of Python's path (PYTHONPATH, `python -m`)"
    )

from adapters.errors import UserError
from flows.evaluate import evaluate
from flows.recipe.loading import named_recipe as recipe
from flows.recipe.recipe import Recipe
from flows.replay import replay
from flows.train import train
from ratchet.run import Run, runs
from tasks.checkpoints import Checkpoint
from tasks.recording.scores import Score

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
