from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ratchet.adapters.calls import Message
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.given.conversations import WeightedTokens, tokenize
from ratchet.tasks.settings.given import Trained

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
GREETING = [
    {"role": "user", "content": "You are a quiet owl. Who are you?"},
    {"role": "assistant", "content": "I am a quiet owl."},
]
TALK = [
    *GREETING,
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "content": "a fox"},
    {"role": "assistant", "content": "I see a fox."},
]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(AutoTokenizer.from_pretrained(TINY))


def trained_texts(found: Sequence[WeightedTokens], chat: Chat) -> list[str]:
    """Decode the runs of trained tokens of each sequence."""
    texts: list[str] = []
    for sequence in found:
        run: list[int] = []
        for token, weight in [*zip(sequence.tokens, sequence.weights, strict=True), (-1, 0.0)]:
            if weight > 0:
                run.append(token)
            elif run:
                texts.append(chat.text(run))
                run = []
    return texts


def test_an_answer_is_trained_behind_the_prompt_that_asks_for_it(chat: Chat) -> None:
    (found,) = tokenize({"messages": GREETING}, chat, "assistant")
    prompt = chat.render([Message(role="user", content=GREETING[0]["content"])], [])
    assert found.tokens[: len(prompt)] == prompt
    assert found.weights == [0.0] * len(prompt) + [1.0] * (len(found.tokens) - len(prompt))
    assert chat.text(found.tokens[len(prompt) :]) == "I am a quiet owl.<|im_end|>"


def test_a_conversation_has_the_tokens_that_the_door_would_have_recorded(chat: Chat) -> None:
    (found,) = tokenize({"messages": TALK[:4]}, chat, "assistant")
    first = chat.render([Message(role="user", content=TALK[0]["content"])], [])
    said = [*chat.encode("I am a quiet owl."), chat.stop_tokens[0]]
    second = chat.extend(first, said, [Message(role="user", content="and now?")], [])
    assert second is not None
    assert found.tokens == [*second, *chat.encode("I look."), chat.stop_tokens[0]]


@pytest.mark.parametrize(
    ("trained", "texts"),
    [
        ("last_message", ["I see a fox.<|im_end|>"]),
        ("last_turn", ["I look.<|im_end|>", "I see a fox.<|im_end|>"]),
        (
            "assistant",
            ["I am a quiet owl.<|im_end|>", "I look.<|im_end|>", "I see a fox.<|im_end|>"],
        ),
    ],
)
def test_the_chosen_answers_are_trained(chat: Chat, trained: Trained, texts: list[str]) -> None:
    assert trained_texts(tokenize({"messages": TALK}, chat, trained), chat) == texts


def test_marked_answers_are_trained_by_their_weights(chat: Chat) -> None:
    marked: list[dict[str, Any]] = [{**message} for message in TALK]
    marked[1] |= {"trainable": True, "weight": 0.5}
    marked[3]["trainable"] = False
    found = tokenize({"messages": marked}, chat, "marked")
    assert trained_texts(found, chat) == ["I am a quiet owl.<|im_end|>"]
    assert {*found[0].weights} == {0.0, 0.5}


def test_all_tokens_but_the_first_are_trained(chat: Chat) -> None:
    (found,) = tokenize({"messages": GREETING}, chat, "all")
    assert found.weights == [0.0, *[1.0] * (len(found.tokens) - 1)]


def test_a_text_ends_with_the_end_of_text(chat: Chat) -> None:
    (found,) = tokenize({"text": "a quiet owl"}, chat, "assistant")
    assert chat.text(found.tokens[:-1]) == "a quiet owl"
    assert found.tokens[-1] == chat.stop_tokens[-1]
    assert found.weights == [0.0, *[1.0] * (len(found.tokens) - 1)]


def test_nulls_that_arrow_adds_change_nothing(chat: Chat) -> None:
    padded = [{**message, "tool_calls": None, "weight": None} for message in GREETING]
    row = {"messages": padded, "tools": None}
    assert tokenize(row, chat, "assistant") == tokenize({"messages": GREETING}, chat, "assistant")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "it has nothing; give messages; conversations; prompt and completion; .*; or text"),
        ({"prompt": "a"}, "it has prompt; give messages"),
        ({"messages": []}, "its messages is \\[\\]; give a list of messages"),
        ({"messages": "hello"}, "its messages is 'hello'; give a list"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]\.role is None; it is one of"),
        ({"messages": GREETING[:1]}, "no message of the role assistant; give an answer"),
        ({"messages": GREETING, "tools": "look"}, "its tools are 'look'; give a list of tools"),
        (
            {"messages": [GREETING[0], {**GREETING[1], "weight": -1}]},
            "the weight -1; give a number from 0 on",
        ),
        ({"text": ["a"]}, r"its text is \['a'\]; give a text"),
    ],
)
def test_a_row_that_is_no_text_is_refused(chat: Chat, row: Mapping[str, Any], why: str) -> None:
    with pytest.raises(DatasetError, match=why):
        tokenize(row, chat, "assistant")


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="<|>"), max_size=12)))
def test_whatever_is_said_every_trained_answer_ends(chat: Chat, said: list[str]) -> None:
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(["hello", *said, *(["end"] if len(said) % 2 == 0 else [])])
    ]
    for found in tokenize({"messages": messages}, chat, "assistant"):
        assert len(found.tokens) == len(found.weights)
        assert found.weights[0] == 0
        trained = [at for at, weight in enumerate(found.weights) if weight]
        ends = [at for at in trained if at + 1 == len(found.tokens) or not found.weights[at + 1]]
        assert all(found.tokens[at] in chat.stop_tokens for at in ends)
