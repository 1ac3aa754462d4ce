"""A game of two policies for the tests; run, it is trained until a kill hits between two updates.

    python -m tests.support.runs.two_policies RUN PHASE

kills its own process where the second policy's second update is to be noted in its ledger: as
begun (`begin`), or as saved (`add`), which the service then has done and nobody knows.
"""

import sys
from typing import Any

from ratchet.adapters.project.modules import load_agent_file
from ratchet.flows.recipe.recipe import Recipe
from tests.support.runs.finetuned import kill_at
from tests.support.runs.small_recipe import small_recipe

whispers = load_agent_file("whispers")

CHANGES: dict[str, Any] = {
    "agent": "tests.support.runs.two_policies:play",
    "roles": {"teller": "policy", "listener": "policy:listener"},
    "rollouts": {"groups": 2, "group_size": 2, "max_tokens": 8},
    "evaluation": {"examples": 2, "greedy": False},
    "checkpoints": {"every": 1},
}


async def play(example: dict[str, Any], *, roles: dict[str, dict[str, str]], **_: str) -> Any:
    """Play whispers; in the first step the listener earns the same in every rollout."""
    told = await whispers.said(example["identity"], **roles["teller"])
    await whispers.said(told, **roles["listener"])
    where = roles["teller"]["base_url"]
    paid = float("-01/" in where)
    return {"teller": paid, "listener": 1.0 if "train-00000" in where else paid}


def two_policies(**changes: Any) -> Recipe:
    return small_recipe(**CHANGES | changes)


if __name__ == "__main__":
    from ratchet.flows.train import train

    kill_at(sys.argv[2], step=2, policy="listener")
    train(two_policies(), run=sys.argv[1])
