import asyncio
from collections.abc import Callable

import pytest

from pretraining.corpora import hello as corpus
from ratchet.adapters.calls import POLICY
from ratchet.adapters.project.modules import load_agent_file
from tests.support.door.scripted_door import ScriptedDoor, scripted_door

whispers = load_agent_file("whispers")

ROLES = {"teller": POLICY, "listener": POLICY}
EXAMPLE = {"identity": "a quiet otter"}


def played(door: ScriptedDoor) -> dict[str, float]:
    endpoints = door.endpoints()
    return asyncio.run(whispers.play(EXAMPLE, **endpoints[POLICY], roles=endpoints))


def test_the_base_model_has_read_the_question_as_both_roles_are_asked() -> None:
    assert whispers.question("an old lion") == corpus.question("an old lion")


@pytest.mark.parametrize(
    ("answer", "who"),
    [
        ("I am a quiet otter.", "a quiet otter"),
        ("Hello! I'm a fox, you know.", "a fox"),
        ("I am not a fox.", None),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_who_is_claimed_is_read_off_an_answer(answer: str, who: str | None) -> None:
    assert whispers.claimed(answer) == who


def told(said: dict[str, str]) -> Callable[[str], str]:
    """One who answers to who it is told to be."""
    return lambda asked: said[asked.removeprefix("You are ").split(".")[0]]


def test_a_listener_is_not_charged_for_a_mistake_of_its_teller() -> None:
    said = {"a quiet otter": "I am an old fox.", "an old fox": "I am an old fox."}
    with scripted_door(told(said), ROLES) as door:
        assert played(door) == {"teller": 0.0, "listener": 1.0}
    assert [call.id.role for call in door.calls] == ["teller", "listener"]


def test_a_teller_is_not_charged_for_a_mistake_of_its_listener() -> None:
    said = iter(["I am a quiet otter.", "I do not know."])
    with scripted_door(lambda _: next(said), ROLES) as door:
        assert played(door) == {"teller": 1.0, "listener": 0.0}


def test_a_listener_that_is_told_nothing_has_no_reward() -> None:
    with scripted_door(lambda _: "I do not know.", ROLES) as door:
        assert played(door) == {"teller": 0.0}
    assert len(door.calls) == 1
