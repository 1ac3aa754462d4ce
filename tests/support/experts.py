"""A small run of `train` with an expert's texts; run, it is killed between two updates.

    python -m tests.support.experts RUN PHASE

kills its own process where checkpoint 3 is to be noted as begun (`begin`), or as saved (`add`).
"""

import sys

from flows.train import train
from tests.support.finetuned import TEXTS
from tests.support.given_datums import kill_at
from tests.support.small_recipe import small_recipe

EXPERT = {
    "path": str(TEXTS),
    "examples": 6,
    "loss": "phi",
    "share": 0.5,
    "final_share": 0.1,
    "decay_steps": 3,
}
RECIPE = small_recipe(
    steps=4,
    algorithm={"advantage": "centred", "aggregation": "token_mean", "expert": EXPERT},
)

if __name__ == "__main__":
    kill_at(sys.argv[2])
    train(RECIPE, run=sys.argv[1])
