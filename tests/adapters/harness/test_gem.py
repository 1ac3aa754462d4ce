"""GEM's environments as agents: their seeds, their rewards and their isolation."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.rewards import Reward
from tests.support.door.scripted_door import ScriptedDoor, scripted_door

pytest.importorskip("gem", reason="GEM is not installed: pip install gem-llm==0.1.0")

ROOT = Path(__file__).parents[3]
GUESS = "gem:game:GuessTheNumber-v0-easy"
GENERATORS = """
import logging, random
import numpy as np
from tests.adapters.harness.test_gem import GUESS, play

random.seed(1)
np.random.seed(1)
expected = random.Random(1).random(), np.random.RandomState(1).random()
handlers = [*logging.root.handlers]
play(GUESS, [3], lambda _: "no number")
assert (random.random(), np.random.random()) == expected
assert logging.root.handlers == handlers
"""


def play(name: str, seeds: list[int], answer: Callable[[str], str]) -> "tuple[list, ScriptedDoor]":
    """Play one rollout of each seed at the same time, and return the rewards."""
    agent = load_agent(name)

    async def rewards(door: ScriptedDoor) -> list[Reward]:
        rollouts = [agent({"seed": seed}, door.endpoints(k)) for k, seed in enumerate(seeds)]
        return await asyncio.gather(*rollouts)

    with scripted_door(answer) as door:
        return asyncio.run(rewards(door)), door


def halve(told: str) -> str:
    """Return the next guess of a binary search over 1 to 8, given the answer to the last one."""
    if "At turn" not in told:
        return "\\boxed{4}"
    [guess, hint] = re.findall(r"you guessed (\d+), and the target number is (\w+)", told)[-1]
    step = {4: 2, 2: 1, 6: 1}.get(int(guess), 1)
    return f"\\boxed{{{int(guess) + (step if hint == 'higher' else -step)}}}"


def test_a_game_is_one_conversation_and_each_call_earns_its_step_s_reward() -> None:
    [reward], door = play(f"{GUESS}?max_number=8", [1], halve)
    said = door.said()
    assert "guess the number between 1 and 8" in said[0]
    assert said[0].endswith("Enter your first guess to start the game.\nEnter your next guess.")
    assert said[1] == "\\boxed{4}"
    assert said[2].startswith("At turn 1, you guessed 4, and the target number is ")
    assert reward.calls == {"policy": (*[0.0] * (len(door.calls) - 1), 1.0)}
    assert reward.value == 1.0


def test_a_wrapper_shows_the_game_so_far_in_one_message_of_a_template() -> None:
    [reward], door = play(f"{GUESS}?max_number=8&wrappers=concat&template=game", [1], halve)
    [told, _] = door.said()
    opening = "You are playing language games. Make valid actions to win.\nObservation: "
    assert told.startswith(opening)
    assert "guess the number between 1 and 8" in told
    assert "At turn 1, you guessed 4" in told
    assert told.endswith("step by step, and put your final answer within \\boxed{}.")
    assert reward.value == 1.0


def test_a_game_depends_on_its_seed_alone_even_beside_other_games() -> None:
    """The game 2048 draws a tile after each move, from the process's generators."""
    name = "gem:game:Game2048-v0-easy?max_turns=5"
    moves = {"same": "\\boxed{left}"}
    seeds = [5, 6, 5, 7, 5]
    together, door = play(name, seeds, lambda _: moves["same"])
    alone, other = play(name, [5], lambda _: moves["same"])
    games = [door.said(k) for k in range(len(seeds))]
    assert len(games[0]) > 4
    assert games[0] == games[2] == games[4] == other.said()
    assert games[1] != games[0] != games[3]
    assert together[0] == together[4] == alone[0]


def test_a_seed_determines_the_question_of_a_data_set() -> None:
    name = "gem:rg:simple_equations?size=5"
    rewards, door = play(name, [1, 200, 1], lambda _: "\\boxed{7}")
    assert door.said(0) == door.said(2) != door.said(1)
    assert [len(reward.calls["policy"]) for reward in rewards] == [1, 1, 1]


@pytest.mark.story
def test_the_process_s_random_generators_and_logging_do_not_change() -> None:
    """The test needs its own process: the SDK's threads draw from this one's generators."""
    command = [sys.executable, "-c", GENERATORS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_invalid_move_ends_the_game_with_the_environment_s_reward() -> None:
    [reward], door = play(GUESS, [3], lambda _: "I do not know.")
    assert (len(door.calls), reward.value) == (1, -0.1)


@pytest.mark.parametrize(
    "example", [{}, {"seed": "7"}, {"seed": -1}, {"seed": 2**32}, {"seed": True}]
)
def test_an_example_without_a_valid_seed_is_refused(example: dict[str, Any]) -> None:
    with (
        scripted_door(str) as door,
        pytest.raises(ValueError, match="a GEM environment needs a whole number from 0"),
    ):
        asyncio.run(load_agent(GUESS)(example, door.endpoints()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gem:game:GuessTheNumber", "has no environment 'game:GuessTheNumber'; it has: game:Guess"),
        ("gem:game:GuessTheNumbr-v0-easy", "did you mean 'game:GuessTheNumber-v0-easy'?"),
        (f"{GUESS}?wrappers=concat_chat", "the wrapper 'concat_chat' is not one that a chat can"),
        (
            f"{GUESS}?template=qwen3",
            "the template 'qwen3' is not known; give one of: game, general",
        ),
        (f"{GUESS}?max_turn=5", "no argument 'max_turn'; it has: min_number, max_number, max_turn"),
    ],
)
def test_an_unknown_environment_or_argument_is_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_agent(name)


def test_a_missing_gem_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(UserError, match="not installed: pip install gem-llm"):
        load_agent(GUESS)
