"""20 Questions by CrewAI, through a door."""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from pretraining.corpora import twenty_questions as corpus
from pretraining.corpora import twenty_questions_search as with_search
from pretraining.corpora.conversation import user
from ratchet.adapters.calls import POLICY
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.project.modules import load_agent_file
from tests.support.door.scripted_door import ScriptedDoor, scripted_door

ANSWERS = "function:twenty_questions_answers:answer"
SEARCH = "function:twenty_questions_answers:search"
HERON = {"answer": "heron", "category": "bird"}
EXPERT = corpus.TwentyQuestionsCorpus()


@cache
def game() -> ModuleType:
    """Load the agent's file. It imports CrewAI, for which no other module waits."""
    return load_agent_file("twenty_questions")


def played(door: ScriptedDoor, rollout: int = 0, example: dict[str, str] = HERON) -> float:
    roles = door.endpoints(rollout)
    return asyncio.run(game().play(example, **roles[POLICY], roles=roles))


def expert() -> Callable[[str], str]:
    """One who knows the table, and remembers what it was told since the opening."""
    told: dict[str, str] = {}
    asked = ""

    def ask(said: str) -> str:
        nonlocal asked
        if said == game().OPENING:
            told.clear()
        else:
            told[asked] = said
        asked = EXPERT.expert(told)
        return asked

    return ask


def test_the_base_model_has_read_the_game_as_the_agent_plays_it() -> None:
    assert corpus.opening() == game().OPENING
    assert corpus.TURNS == game().TURNS


def test_an_expert_wins_in_a_conversation_that_only_grows() -> None:
    examples = [noun for noun in corpus.nouns() if noun["split"] == "test"][::20]
    with scripted_door(expert(), {"answerer": ANSWERS}, examples) as door:
        assert [played(door, place, each) for place, each in enumerate(examples)] == [1.0, 1.0]
    first = [call for call in door.calls if call.id.rollout_id.endswith("-00")]
    asked = [call for call in first if call.id.role == POLICY]
    answered = [call for call in first if call.id.role == "answerer"]
    assert len(asked) == len(answered)
    told = [json.loads(str(call.message["content"]))["yes_or_no"] for call in answered]
    for (call, following), answer in zip(pairwise(asked), told, strict=False):
        grown = [*call.request.messages, call.message, user(answer)]
        assert following.request.messages == grown
        assert following.kept_call == call.id.number


def test_an_answerer_is_told_the_secret_and_one_question_and_asked_for_json() -> None:
    with scripted_door(lambda _: "Is it a heron?", {"answerer": ANSWERS}, [HERON]) as door:
        assert played(door) == 1.0
    asked, answered = door.calls
    system, user = answered.request.messages
    assert "The secret is: heron (bird)." in system["content"]
    assert user == {"role": "user", "content": "Is it a heron?"}
    form: Any = answered.request.fields["response_format"]
    assert form["json_schema"]["name"] == "Verdict"
    assert "heron" not in asked.request.messages[0]["content"].removeprefix(game().OPENING)


def test_a_game_is_lost_after_twenty_questions() -> None:
    with scripted_door(lambda _: "Is it a\nsofa?", {"answerer": ANSWERS}, [HERON]) as door:
        assert played(door) == 0.0
    *_, asked, answered = door.calls
    assert len(door.calls) == 2 * 20
    assert len(asked.request.messages) == 1 + 2 * 19
    assert asked.request.messages[-2]["content"] == "Is it a\nsofa?"
    assert answered.request.messages[-1]["content"] == "Is it a sofa?"


def test_an_answer_that_is_not_the_json_asked_for_is_no_answer() -> None:
    with scripted_door(lambda _: "Is it a heron?", {"answerer": SEARCH}, [HERON]) as door:
        assert played(door) == 0.0
    asked = [call for call in door.calls if call.id.role == POLICY]
    assert asked[1].request.messages[-1] == user("n/a")


def searching(said: str) -> Callable[[str], str]:
    """One who searches for `said` before asking about it."""
    call = {"name": "search", "arguments": {"query": said}}

    def answer(told: str) -> str:
        if "<tool_response>" in told:
            return f"Is it a {said}?"
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return answer


def test_with_a_search_the_player_may_look_something_up_before_it_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The base model has read what is sent, and CrewAI logs nothing at a call."""
    load_agent("twenty_questions")
    with scripted_door(
        searching("heron"), {"answerer": ANSWERS, "search": SEARCH}, [HERON]
    ) as door:
        assert played(door) == 1.0
    assert [call.id.role for call in door.calls] == [POLICY, "search", POLICY, "answerer"]
    first, search, after, _ = door.calls
    assert search.request.messages[-1]["content"] == "heron"
    assert after.kept_call == 0
    system, asked = first.request.messages
    assert system == {"role": "system", "content": with_search.SYSTEM}
    assert asked["content"] == f"\nCurrent Task: {corpus.opening()}"
    assert json.dumps(first.request.tools) == json.dumps([with_search.SEARCH])
    assert after.request.messages[-1]["content"] == with_search.search_result("heron")
    assert not [r for r in caplog.records if r.name != "ratchet.adapters.process.clock"]


def test_with_a_search_too_the_conversation_only_grows() -> None:
    searches = searching("sofa")

    def searches_once(told: str) -> str:
        return "Is it a heron?" if told.endswith("no") else searches(told)

    with scripted_door(searches_once, {"answerer": ANSWERS, "search": SEARCH}, [HERON]) as door:
        assert played(door) == 1.0
    asked = [call for call in door.calls if call.id.role == POLICY]
    assert [call.kept_call for call in asked] == [None, 0, 1]
    assert asked[-1].request.messages[-1] == user("\nCurrent Task: no")


def test_an_answer_without_text_costs_a_player_with_a_search_a_turn_and_not_the_game() -> None:
    said = iter(["", "Is it a heron?"])
    with scripted_door(
        lambda _: next(said), {"answerer": ANSWERS, "search": SEARCH}, [HERON]
    ) as door:
        assert played(door) == 1.0
    assert [call.id.role for call in door.calls] == [POLICY, "answerer"] * 2


def test_it_runs_alone_by_the_addresses_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_door(lambda _: "Is it a heron?", {"answerer": ANSWERS}, [HERON]) as door:
        endpoints = door.endpoints()
        for name, role in (("OPENAI", POLICY), ("ANSWERER", "answerer")):
            for key, value in endpoints[role].items():
                monkeypatch.setenv(f"{name}_{key.upper()}", str(value))
        monkeypatch.setattr(sys, "argv", ["twenty_questions.py", "heron", "bird"])
        game().main()
    assert capsys.readouterr().out == "Is it a heron? yes\n1.0\n"
