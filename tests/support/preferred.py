"""A small run of `prefer`; run, it is killed between two updates.

    python -m tests.support.preferred RUN PHASE

kills its own process where checkpoint 3 is to be noted as begun (`begin`), or as saved (`add`).
"""

import sys
from pathlib import Path

from flows.prefer import prefer
from flows.recipe.preferring import PreferRecipe
from tests.support.given_datums import kill_at

PAIRS = Path(__file__).parents[2] / "datasets" / "hello_pairs.jsonl"
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
