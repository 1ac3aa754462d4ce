"""A small run of `prefer`; run, it is killed between two updates.

    python -m tests.support.runs.preferred RUN PHASE

kills its own process where checkpoint 3 is to be noted as begun (`begin`), or as saved (`add`).
"""

import sys
from pathlib import Path

from ratchet.flows.prefer import prefer
from ratchet.flows.recipe.given_recipes import PreferRecipe
from tests.support.runs.finetuned import kill_at

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


if __name__ == "__main__":
    kill_at(sys.argv[2])
    prefer(RECIPE, run=sys.argv[1])
