"""GEM's example of training on Tinker, as a recipe: `gem-qwen` by the example's own formulas."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.harness.agents import load_agent
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.train import train
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table, select

pytest.importorskip("gem", reason="GEM is not installed: pip install gem-llm==0.1.0")

TINY_CHAT = Path(__file__).parents[2] / "engine" / "tiny_chat"
CALLS = """
    select rollout_id, call, reward from parquet_rows($spans)
    where kind = 'credit' and call is not null order by rollout_id, call
"""
TINY = (
    "steps=1",
    "agent=gem:game:GuessTheNumber-v0-easy?wrappers=concat&max_turns=4",
    "model.base=local/tiny-chat",
    "rollouts.groups=6",
    "rollouts.max_tokens=24",
    "rollouts.rounds=2",
    "algorithm.trained_calls=5",
    "optimizer.learning_rate=0.005",
    "evaluation.examples=2",
)


@pytest.fixture(scope="module")
def trained(root: Path, prefect_server: None, no_tinker: None) -> RunFolder:
    """Train one step of the recipe on the tiny model."""
    train(named_recipe("gem-qwen", TINY), run="games")
    return folder_of("games")


def expected(run: RunFolder, gamma: float) -> dict[tuple[str, int], float]:
    """Compute the advantage of each call as GEM's example does for its transitions."""
    spans = [str(path) for path in run.sealed("train-00000")]
    games: dict[str, list[Any]] = {}
    for row in select(CALLS, spans=spans).to_pylist():
        games.setdefault(row["rollout_id"], []).append(row)
    returns = {}
    for name, calls in games.items():
        following = 0.0
        for row in reversed(calls):
            following = row["reward"] + gamma * following
            returns[name, row["call"]] = following
    values = np.array([*returns.values()])
    normal = (values - values.mean()) / (values.std(ddof=1) + 1e-9)
    return dict(zip(returns, normal.tolist(), strict=True))


@pytest.mark.story
def test_each_transition_has_the_example_s_advantage_and_a_part_of_them_is_trained(
    trained: RunFolder,
) -> None:
    wanted = expected(trained, gamma=0.9)
    rows = read_table(trained.datums("policy", 0)).to_pylist()
    assert len(wanted) > len(rows) == 5, "five of all calls are trained"
    for row in rows:
        credited = {value for value, bit in zip(row["advantages"], row["mask"], strict=True) if bit}
        call = row["rollout_id"], row["first_call"]
        assert [*credited] == [pytest.approx(wanted[call], abs=1e-6)]


@pytest.mark.story
def test_a_prompt_is_one_turn_of_the_user_as_in_the_example(trained: RunFolder) -> None:
    """The tiny model knows the game, but not the text of the recipe's template around it."""
    text = AutoTokenizer.from_pretrained(TINY_CHAT).decode(prompt_of(trained))
    turn = r"<\|im_start\|>user\n.*<\|im_end\|>\n<\|im_start\|>assistant\n"
    assert re.fullmatch(turn, text, re.DOTALL)
    assert text.count("<|im_start|>") == 2


def prompt_of(run: RunFolder) -> list[int]:
    """Return the last prompt of the longest game."""
    rows = read_table(run.datums("policy", 0)).to_pylist()
    row = max(rows, key=lambda row: row["first_call"])
    return [*row["tokens"], row["targets"][-1]][: row["mask"].index(1) + 1]


def test_the_recipe_has_the_values_of_the_example() -> None:
    recipe = named_recipe("gem-qwen")
    load_agent(recipe.agent)
    assert recipe.policies() == {"policy": ("policy",)}
    assert (recipe.rollouts.groups, recipe.rollouts.group_size) == (32, 1)
    assert (recipe.algorithm.loss, recipe.algorithm.trained_calls) == ("importance_sampling", 128)
    adam = recipe.update_method().request(0, []).optimizer
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (4e-5, 0.9, 0.95, 1e-8)
    assert recipe.rollouts.temperature == 1.0
