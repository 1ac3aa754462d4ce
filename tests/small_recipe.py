"""A recipe that trains hello for a few seconds."""

from pathlib import Path
from typing import Any

from flows.recipe import Recipe

HELLO = Path(__file__).parent.parent / "datasets" / "hello.csv"


def small_recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "agent": "hello",
        "dataset": {"path": str(HELLO), "columns": ["identity"]},
        "steps": 2,
        "model": {"lora_rank": 8},
        "rollouts": {"groups": 4, "group_size": 4, "max_tokens": 16},
        "optimizer": {"learning_rate": 0.005},
        "evaluation": {"examples": 4},
        "checkpoints": {"every": 2},
    }
    return Recipe.model_validate(values | changes)
