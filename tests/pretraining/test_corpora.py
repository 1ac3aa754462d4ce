from collections.abc import Callable
from functools import partial
from itertools import islice
from random import Random

import pytest

from pretraining.corpora import arithmetic, gem_guesses, hello, mixture, tool_calls
from pretraining.corpora import guess_the_number as guessing
from pretraining.corpora import twenty_questions as twenty
from pretraining.corpora import twenty_questions_search as with_search
from pretraining.corpora.conversation import Conversation, Exam

pytest.importorskip("gem", reason="GEM is not installed: pip install gem-llm==0.1.0")

FORMATS = mixture.examined_corpora()


def played(exam: Exam, player: Callable[[Conversation], str]) -> float:
    """Return the reward of a player that answers every prompt."""
    prompt = next(exam)
    while True:
        try:
            prompt = exam.send(player(prompt))
        except StopIteration as finished:
            return finished.value


def _right(name: str, prompt: Conversation) -> str:
    said = prompt.messages[-1]["content"]
    if name == "hello":
        return f"I am {said.removeprefix('You are ').split('.')[0]}."
    if name == "guess_the_number":
        low, top = 1, int(prompt.messages[0]["content"].split(" to ")[1].split(".")[0])
        for guess, reply in zip(prompt.messages[1::2], prompt.messages[2::2], strict=True):
            number = guessing.guess_in(guess["content"]) or 0
            low, top = (number + 1, top) if reply["content"] == "Higher." else (low, number - 1)
        return f"{(low + top) // 2}"
    if name == "gem_guesses":
        return gem_guesses.halving(prompt.messages)
    said = [message["content"] for message in prompt.messages if message["role"] != "system"]
    told = [content.removeprefix("\nCurrent Task: ") for content in said[2::2]]
    return twenty.TwentyQuestionsCorpus().expert(dict(zip(said[1::2], told, strict=True)))


GAMES = ["guess_the_number", "gem_guesses", "twenty_questions", "twenty_questions_search"]


@pytest.mark.parametrize("name", ["hello", *GAMES])
def test_perfect_player_earns_every_reward(name: str) -> None:
    for index in range(40):
        assert played(FORMATS[name].exam(index), partial(_right, name)) == 1.0


def test_equal_seeds_stream_equal_conversations() -> None:
    first, second = (list(islice(mixture.stream("s", 0.5), 50)) for _ in range(2))
    assert first == second


def test_every_conversation_ends_with_a_nonempty_answer() -> None:
    for conversation in islice(mixture.stream("s", 1.0), 500):
        assert conversation.messages[-1]["role"] == "assistant"
        assert all(message["content"] for message in conversation.messages)


def test_documents_contain_no_held_out_identities_or_problems() -> None:
    held_out = {hello.question(name) for name in hello.identities()[: hello.TEST]}
    held_out |= {
        arithmetic.question(str(row["question"]))
        for row in arithmetic.examples()
        if row["split"] == "test"
    }
    read = {conversation.messages[0]["content"] for conversation in _read(3000)}
    assert not read & held_out


def _read(count: int) -> list[Conversation]:
    return list(islice(mixture.stream("read", 1.0), count))


@pytest.mark.parametrize("name", ["hello", "arithmetic"])
def test_noise_is_the_share_of_wrong_answers(name: str) -> None:
    rng = Random(0)
    for noise, least, most in ((0.5, 225, 280), (0.0, 500, 500)):
        documents = [FORMATS[name].document(rng, noise) for _ in range(500)]
        right = sum(_rewarded(name, document) == 1.0 for document in documents)
        assert least <= right <= most


def _rewarded(name: str, document: Conversation) -> float:
    asked, answered = (message["content"] for message in document.messages)
    if name == "hello":
        return hello.reward(answered, asked.removeprefix("You are ").split(".")[0])
    return arithmetic.reward(answered, _result(asked))


def _result(asked: str) -> int:
    numbers = [int(word) for word in asked.replace(".", "").split() if word.isdigit()]
    if "boxes" in asked:
        return numbers[0] * numbers[1]
    if "buys" in asked or "gets" in asked:
        return numbers[0] + numbers[1] - sum(numbers[2:])
    return numbers[0] - numbers[1]


def test_twenty_questions_answers_come_from_the_table() -> None:
    heron = next(noun for noun in twenty.nouns() if noun["answer"] == "heron")
    assert twenty.answer_to("Does it fly?", heron) == ("yes", False)
    assert twenty.answer_to("does it FLY?", heron) == ("yes", False)
    assert twenty.answer_to("Is it a fish?", heron) == ("no", False)
    assert twenty.answer_to("Is it an owl?", heron) == ("no", False)
    assert twenty.answer_to("Is it a heron?", heron) == ("yes", True)
    assert twenty.answer_to("What is it?", heron) == ("n/a", False)


def test_twenty_questions_are_lost_after_twenty_turns() -> None:
    asked: list[Conversation] = []
    exam = FORMATS["twenty_questions"].exam(0)
    assert played(exam, lambda prompt: asked.append(prompt) or "Is it a sofa?") == 0.0
    assert len(asked) == 20
    assert len(asked[-1].messages) == 1 + 2 * 19


def test_third_search_before_a_question_costs_a_question() -> None:
    asked: list[Conversation] = []
    look_up = tool_calls.call("search", {"query": "sofa"})
    exam = FORMATS["twenty_questions_search"].exam(0)
    assert played(exam, lambda prompt: asked.append(prompt) or look_up) == 0.0
    assert len(asked) == 20 * 3
    first, found = asked[1].messages[-2:]
    assert (first["content"], found["role"]) == (look_up, "tool")
    assert found["content"].startswith("sofa (furniture): yes to ")


def test_context_only_searches_are_not_trained() -> None:
    games = [FORMATS["twenty_questions_search"].document(Random(seed), 0.0) for seed in range(40)]
    looked_up = [
        (game, place)
        for game in games
        for place, said in enumerate(game.messages)
        if with_search.parse_query(said["content"])
    ]
    assert looked_up
    assert all(place in game.ignored for game, place in looked_up)


def test_tool_call_must_parse_and_be_the_right_one() -> None:
    call = tool_calls.call("add", {"a": 1, "b": 2})
    assert tool_calls.reward(call, "add", {"b": 2, "a": 1}) == 1.0
    assert tool_calls.reward(call, "add", {"a": 1, "b": 3}) == 0.0
    assert tool_calls.reward(call.replace("}}", "}"), "add", {"a": 1, "b": 2}) == 0.0
    assert tool_calls.reward("It is 3.", "add", {"a": 1, "b": 2}) == 0.0


def test_context_only_answers_are_marked_as_ignored() -> None:
    rng = Random(1)
    games = [FORMATS["guess_the_number"].document(rng, noise=0.0) for _ in range(200)]
    assert any(game.ignored for game in games)
    for game in games:
        for position, message in enumerate(game.messages):
            if message["role"] == "assistant" and position not in game.ignored:
                assert message["content"].startswith("From ")
