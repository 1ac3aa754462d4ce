"""A small sweep, one of whose runs fails; run, it ends itself by SIGKILL in the second run.

python -m tests.support.runs.swept RUN
"""

import os
import signal
import sys
from typing import Any

from ratchet.flows.recipe.plan import SweepRecipe
from ratchet.flows.sweep import sweep
from ratchet.tasks.updates import PolicyUpdater
from tests.support.runs.small_recipe import small_recipe

LEARNING = ("0.002", "0.01")
UNREWARDED = "tests.support.agents.unrewarded:play"
RECIPE = SweepRecipe.model_validate(
    {
        "base": small_recipe(checkpoints={"every": 1}).model_dump(mode="json"),
        "listed": [
            *({"optimizer.learning_rate": float(rate)} for rate in LEARNING),
            {"judge.agent": UNREWARDED},
        ],
    }
)


def end_in(run: str) -> None:
    """Have this process ended in the first update of a run."""
    save = PolicyUpdater.update

    def save_or_end(self: PolicyUpdater, *args: Any, **options: Any) -> Any:
        if self.ledger.path.parent.name == run:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(self, *args, **options)

    PolicyUpdater.update = save_or_end


if __name__ == "__main__":
    end_in(f"{sys.argv[1]}-lr{LEARNING[1]}")
    sweep(RECIPE, run=sys.argv[1])
