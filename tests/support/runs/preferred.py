"""A small run of `prefer`; run, it is killed between two updates, or before the first.

    python -m tests.support.runs.preferred RUN PHASE

kills its own process where checkpoint 3 is to be noted as begun (`begin`), or as saved (`add`), or
where the reference is to score the third part of the pairs (`score`).
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.flows.prefer import prefer
from ratchet.tasks.given import pairs
from ratchet.flows.recipe.given_recipes import PreferRecipe
from tests.support.runs.given_datums import kill_at

PAIRS = Path(__file__).with_name("some_pairs.jsonl")
"""Those of hello, of which a reference scores three parts: 144 pairs, and 16 held-out ones."""
RECIPE = PreferRecipe.model_validate(
    {
        "dataset": {"path": str(PAIRS)},
        "steps": 6,
        "model": {"lora_rank": 8},
        "batch": {"pairs": 6},
        "evaluation": {"every": 4, "examples": 16},
        "optimizer": {"learning_rate": 0.002},
        "checkpoints": {"every": 2},
    }
)


def kill_at_part(number: int) -> None:
    """Have this process killed when the reference is to score a part."""
    score, parts = pairs.score_trained, count()

    def score_or_die(*asked: Any) -> list[np.ndarray]:
        if next(parts) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return score(*asked)

    pairs.score_trained = score_or_die


if __name__ == "__main__":
    kill_at_part(2) if sys.argv[2] == "score" else kill_at(sys.argv[2])
    prefer(RECIPE, run=sys.argv[1])
