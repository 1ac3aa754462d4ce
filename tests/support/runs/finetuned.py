"""A small run that learns texts; run, it is killed between two updates.

    python -m tests.support.runs.finetuned RUN PHASE [taught|expert]

kills its own process where checkpoint 3 is to be noted as begun (`begin`), or as saved (`add`).
"""

import os
import signal
import sys
from pathlib import Path

from ratchet.flows.finetune import finetune
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from tests.support.runs.small_recipe import small_recipe

TEXTS = Path(__file__).parents[3] / "datasets" / "hello_texts.jsonl"
RECIPE = FinetuneRecipe.model_validate(
    {
        "dataset": {"path": str(TEXTS)},
        "steps": 6,
        "model": {"lora_rank": 8},
        "batch": {"examples": 8},
        "evaluation": {"every": 4, "examples": 16},
        "optimizer": {"learning_rate": 0.005},
        "checkpoints": {"every": 2},
    }
)

TAUGHT = FinetuneRecipe.model_validate(
    RECIPE.model_dump(exclude_unset=True)
    | {
        "dataset": {"path": str(Path(__file__).with_name("some_texts.jsonl"))},
        "teacher": {"model": "school@6", "top_k": 8},
    }
)
"""160 of the same texts with a teacher, the last checkpoint of a run `school`."""

EXPERT = {
    "path": str(TEXTS),
    "examples": 6,
    "loss": "phi",
    "share": 0.5,
    "final_share": 0.1,
    "decay_steps": 3,
}
WITH_EXPERT = small_recipe(
    steps=4,
    algorithm={"advantage": "centred", "aggregation": "token_mean", "expert": EXPERT},
)
"""Rollouts, and beside them the same texts as an expert's."""

def kill_at(phase: str, step: int = 3, policy: str | None = None) -> None:
    """Have this process killed when the ledger of a policy, or of any, is told of a checkpoint."""
    note = getattr(Ledger, phase)

    def note_or_die(ledger: Ledger, noted: int | Checkpoint) -> None:
        told = noted if isinstance(noted, int) else noted.step
        if told == step and policy in (None, ledger.path.parent.name):
            os.kill(os.getpid(), signal.SIGKILL)
        note(ledger, noted)

    setattr(Ledger, phase, note_or_die)


if __name__ == "__main__":
    kill_at(sys.argv[2])
    if sys.argv[3:] == ["expert"]:
        train(WITH_EXPERT, run=sys.argv[1])
    else:
        finetune(TAUGHT if sys.argv[3:] else RECIPE, run=sys.argv[1])
