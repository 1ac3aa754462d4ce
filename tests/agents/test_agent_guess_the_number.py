import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from pretraining.corpora import guess_the_number as corpus
from ratchet.adapters.calls import POLICY
from ratchet.adapters.project.modules import load_agent_file
from tests.support.door.scripted_door import ScriptedDoor, scripted_door

guess_the_number = load_agent_file("guess_the_number")

GAME = {"high": 20, "guesses": 5, "secret": 17}


def halving(high: int) -> Callable[[str], str]:
    """A player that remembers what its guesses were told."""
    low, top = 1, high

    def guess(told: str) -> str:
        nonlocal low, top
        middle = (low + top) // 2
        if told == "Higher.":
            low = middle + 1
        elif told == "Lower.":
            top = middle - 1
        return f"From {low} to {top}. My guess is {(low + top) // 2}."

    return guess


def played(door: ScriptedDoor) -> float:
    return asyncio.run(guess_the_number.play(GAME, **door.endpoints()[POLICY]))


@pytest.mark.parametrize("example", corpus.examples()[:20], ids=str)
def test_the_base_model_has_read_the_game_as_the_agent_plays_it(example: dict[str, int]) -> None:
    high, guesses, secret = example["high"], example["guesses"], example["secret"]
    assert guess_the_number.opening(high, guesses) == corpus.opening(high, guesses)
    for guess in [None, *(number for number in range(1, high + 1) if number != secret)]:
        assert guess_the_number.reply(guess, secret) == corpus.reply(guess, secret)


@pytest.mark.parametrize(
    "said", ["From 11 to 20. My guess is 15.", "7", "I do not know.", "", "9" * 5000]
)
def test_a_guess_is_read_as_the_corpus_reads_it(said: str) -> None:
    assert guess_the_number.guess_in(said) == corpus.guess_in(said)


def test_halving_wins_and_every_prompt_extends_the_one_before() -> None:
    with scripted_door(halving(20)) as door:
        reward = played(door)
    assert reward == 1.0
    said = [str(call.message["content"]) for call in door.calls]
    assert [guess_the_number.guess_in(each) for each in said] == [10, 15, 18, 16, 17]
    for before, after in pairwise(door.calls):
        said = [*before.prompt_token_ids, *before.response_token_ids]
        assert list(after.prompt_token_ids[: len(said)]) == said
        assert after.kept_tokens == len(said)


def test_the_guesses_are_all_there_are_and_one_without_a_number_counts() -> None:
    with scripted_door(lambda _: "I do not know.") as door:
        reward = played(door)
    assert reward == 0.0
    assert len(door.calls) == 5
    assert door.calls[1].request.messages[-1]["content"] == "Please guess a number."
