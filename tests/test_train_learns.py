"""The story that matters most: the model behind an agent learns, on held-out examples."""

from pathlib import Path

import pytest

from flows.train import train
from tests.small_recipe import small_recipe


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_held_out_reward_rises_within_six_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    recipe = small_recipe(
        steps=6,
        rollouts={"groups": 16, "group_size": 8, "max_tokens": 24},
        evaluation={"examples": 64, "greedy": False},
    )
    outcome = train(recipe, run="learning")

    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.before <= 0.5
    assert outcome.after >= outcome.before + 0.3
