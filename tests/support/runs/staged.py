"""A small run in stages; run, it ends itself by a signal in a stage, or between the first two.

python -m tests.support.runs.staged RUN PLACE SIGNAL
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratchet.flows import stages as flow
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.tasks.storage.plan_record import PlanRecord
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.updates import PolicyUpdater

DATASETS = Path(__file__).parents[3] / "datasets"
HELLO = {
    "agent": "hello",
    "dataset": {"path": str(DATASETS / "hello.csv"), "columns": ["identity"]},
    "steps": 2,
    "rollouts": {"groups": 4, "group_size": 4, "max_tokens": 16},
    "evaluation": {"examples": 4},
}
SHARED = {
    "model": {"lora_rank": 8},
    "optimizer": {"learning_rate": 0.002},
    "checkpoints": {"every": 2},
}
VALUES: Mapping[str, Any] = {
    "flow": "stages",
    "shared": SHARED,
    "stages": [
        {
            "name": "texts",
            "flow": "finetune",
            "recipe": {
                "dataset": {"path": str(DATASETS / "hello_texts.jsonl")},
                "steps": 4,
                "batch": {"examples": 8},
                "evaluation": {"every": 2, "examples": 16},
            },
        },
        {"name": "rewards", "start": "best", "recipe": HELLO},
        {
            "name": "pairs",
            "flow": "prefer",
            "recipe": {
                "dataset": {"path": str(Path(__file__).with_name("some_pairs.jsonl"))},
                "steps": 2,
                "batch": {"pairs": 6},
                "evaluation": {"examples": 16},
            },
        },
    ],
    "evaluate": HELLO,
}
RECIPE = StagesRecipe.model_validate(VALUES)


def end_at(place: str, number: int) -> None:
    """Have this process ended in the first update of a stage, or when the first has finished."""
    save, write = PolicyUpdater.update, flow.write_plan

    def save_or_end(self: PolicyUpdater, *args: Any, **options: Any) -> Any:
        if self.ledger.path.parent.name.endswith(place):
            os.kill(os.getpid(), number)
        return save(self, *args, **options)

    def write_or_end(run: RunFolder, record: PlanRecord) -> None:
        write(run, record)
        if place == "between" and record.results:
            os.kill(os.getpid(), number)

    PolicyUpdater.update = save_or_end
    flow.write_plan = write_or_end


if __name__ == "__main__":
    end_at(sys.argv[2], int(sys.argv[3]))
    flow.stages(RECIPE, run=sys.argv[1])
