"""Rewards of the examples' agents whose answer is the whole of what is scored."""

from typing import Any

import pytest

from pretraining.corpora import arithmetic as corpus
from ratchet.adapters.project.modules import load_agent_file

number_alone, two_steps = map(load_agent_file, ("number_alone", "two_steps"))
WANTED: dict[str, Any] = {
    "arithmetic": 12,
    "number_alone": 12,
    "two_steps": 7,
    "json_fields": {"name": "Emma", "age": 30, "city": "Prague"},
}
REWARDS = {
    "arithmetic": {
        "7 + 5 = 12. #### 12": 1.0,
        "####12": 1.0,
        "#### 12 #### 13": 1.0,
        "#### 120": 0.0,
        "12": 0.0,
        "": 0.0,
    },
    "number_alone": {
        "12": 1.0,
        " 12\n": 1.0,
        "12.": 0.0,
        "7 + 5 = 12": 0.0,
        "The answer is 12": 0.0,
        "-12": 0.0,
        "120": 0.0,
        "": 0.0,
    },
    "two_steps": {
        "4 + 8 = 12\n12 - 5 = 7\nanswer: 7": 1.0,
        "answer: 7\n": 1.0,
        "4 + 8 = 12\n12 - 5 = 7": 0.0,
        "answer: 7\nanswer: 6": 0.0,
        "The answer: 7": 0.0,
        "answer: 7.": 0.0,
        "answer: 17": 0.0,
        "": 0.0,
    },
    "json_fields": {
        '{"name": "Emma", "age": 30, "city": "Prague"}': 1.0,
        '\n{"city": "Prague",\n "age": 30, "name": "Emma"}\n': 1.0,
        '{"name": "Emma", "age": 30, "city": "Oslo"}': 2 / 3,
        '{"name": "Emma", "age": "30", "city": "Prague"}': 2 / 3,
        '{"name": "Emma", "age": true, "city": null}': 1 / 3,
        '{"name": "Emma", "age": 30}': 0.0,
        '{"name": "Emma", "age": 30, "city": "Prague", "job": "pilot"}': 0.0,
        'Here it is: {"name": "Emma", "age": 30, "city": "Prague"}': 0.0,
        '["name", "age", "city"]': 0.0,
        "": 0.0,
    },
}


@pytest.mark.parametrize(
    ("agent", "answer", "reward"),
    [(agent, *row) for agent, rows in REWARDS.items() for row in rows.items()],
)
def test_the_form_that_is_asked_for_alone_is_paid(agent: str, answer: str, reward: float) -> None:
    assert load_agent_file(agent).reward(answer, WANTED[agent]) == reward
    assert agent != "arithmetic" or corpus.reward(answer, 12) == reward


def test_the_base_model_has_read_the_question_as_the_agent_asks_it() -> None:
    text = "Tom has 2 apples and buys 3 more. How many apples does Tom have?"
    assert load_agent_file("arithmetic").question(text) == corpus.question(text)


def test_two_answered_examples_come_before_the_question() -> None:
    *shown, asked = number_alone.conversation("What is 4 + 4?")
    assert [message["role"] for message in shown] == ["user", "assistant"] * 2
    for question, answer in zip(shown[::2], shown[1::2], strict=True):
        left, sign, right = question["content"].removeprefix("What is ").removesuffix("?").split()
        right_answer = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert number_alone.reward(answer["content"], right_answer) == 1.0
    assert asked == {"role": "user", "content": "What is 4 + 4?"}


def test_three_solved_problems_come_before_the_question() -> None:
    *shown, asked = two_steps.conversation("Ella has 4 eggs, finds 1 more and loses 2.")
    assert [message["role"] for message in shown] == ["user", "assistant"] * 3
    assert asked["role"] == "user"
    assert asked["content"].startswith("Ella has 4 eggs")
