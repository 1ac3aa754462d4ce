"""The story that matters most: the model behind an agent learns, whichever algorithm trains it."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.flows.train import train
from tests.support.runs.small_recipe import small_recipe

ALGORITHMS: dict[str, dict[str, Any]] = {
    "centred REINFORCE": {"algorithm": {"advantage": "centred", "loss": "cross_entropy"}},
    "GRPO with several updates, compared over the step": {
        "algorithm": {
            "preset": "grpo",
            "advantage": "reinforce_plus_plus",
            "kl": {"coefficient": 0},
        },
        "optimizer": {"learning_rate": 0.002, "substeps": 4},
    },
    "a loss by weights": {
        "algorithm": {"advantage": "leave_one_out", "loss": "topr"},
        "optimizer": {"learning_rate": 0.002, "substeps": 4},
    },
}
FIRST, *OTHERS = ALGORITHMS


@pytest.mark.usefixtures("prefect_server", "tiny_chat")
@pytest.mark.parametrize(
    "algorithm", [FIRST, *(pytest.param(one, marks=pytest.mark.story) for one in OTHERS)]
)
def test_held_out_reward_rises_within_three_steps(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    recipe = small_recipe(
        steps=3,
        rollouts={"groups": 10, "group_size": 6, "max_tokens": 24},
        evaluation={"examples": 24, "greedy": False},
        **ALGORITHMS[algorithm],
    )
    outcome = train(recipe, run="learning")

    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.before <= 0.5
    assert outcome.after >= outcome.before + 0.25
