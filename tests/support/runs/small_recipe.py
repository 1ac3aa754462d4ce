"""A recipe that trains hello for a few seconds."""

import json
from pathlib import Path
from typing import Any

from ratchet.flows.recipe.recipe import Recipe

DISTILLED = ("on_policy_distill", "jsd")
MIXED = ("mix", "mix_chord")
HELLO = Path(__file__).parents[3] / "datasets" / "hello.csv"

ALWAYS = "held_out/reward/mean >= -1e9"
"""A condition that checkpoint 0 meets."""


def with_faults(folder: Path, faults: str) -> dict[str, Any]:
    """Return changes of a recipe that train `faulty_agent.py` with faults in its second step.

    They are listed in the file `flag` of `folder`, which the last one removes.
    """
    (folder / "flag").write_text(faults)
    examples = [
        {"identity": f"a {name} otter", "split": split, "flag": str(folder / "flag")}
        for split in ("train", "test")
        for name in ("quiet", "loud", "small", "tall")
    ]
    dataset = folder / "examples.jsonl"
    dataset.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return {"agent": "tests.support.agents.faulty_agent:play", "dataset": {"path": str(dataset)}}


def taught(**algorithm: Any) -> dict[str, Any]:
    """Return the keys of an algorithm, with the teacher or the expert that it trains by."""
    preset = algorithm.get("preset")
    if preset in MIXED:
        return algorithm | {"expert": {"path": "texts.jsonl"}}
    alone = algorithm.get("advantage") == "zero" or preset in DISTILLED
    return algorithm | ({"teacher": {"models": ("run@3",)}} if alone else {})


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


def stopping(stop: dict[str, object], **changes: object) -> Recipe:
    """Return a recipe of six steps that measures each second checkpoint, with a `stop`.

    Its `rollouts` are changed by the key.
    """
    evaluation = {"examples": 2, "greedy": False, "every": 2}
    values = small_recipe(steps=6, evaluation=evaluation).model_dump()
    rollouts = values["rollouts"] | changes.pop("rollouts", {})
    return Recipe.model_validate({**values, "stop": stop, "rollouts": rollouts, **changes})
