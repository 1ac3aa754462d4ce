"""The offline answerer and search, against the table as the base model has learnt it."""

import json

import pytest

from pretraining.corpora import twenty_questions as corpus
from pretraining.corpora.conversation import user
from ratchet.adapters.project.modules import load_agent_file

offline = load_agent_file("twenty_questions_answers")


def told(question: str, secret: str) -> tuple[str, bool]:
    """What the answerer's JSON says."""
    answer = json.loads(offline.answer([user("a preface"), user(question)], {"answer": secret}))
    return answer["yes_or_no"], answer["correct"]


def test_every_question_about_every_noun_is_answered_by_the_table() -> None:
    for noun in corpus.nouns():
        for question in [*corpus.facts(), "Is it a fox?", "Is it an owl?", "What is it?", ""]:
            assert told(question, noun["answer"]) == corpus.answer_to(question, noun), (
                noun["answer"],
                question,
            )


def test_every_noun_is_recognised_and_no_other_is_taken_for_it() -> None:
    nouns = corpus.nouns()
    for noun, other in zip(nouns, [*nouns[1:], nouns[0]], strict=True):
        assert told(corpus.guess(noun), noun["answer"]) == ("yes", True)
        assert told(corpus.guess(other), noun["answer"])[1] is False


def test_a_noun_that_the_table_lacks_can_be_guessed_and_not_asked_about() -> None:
    assert told("Is it a submarine?", "submarine") == ("yes", True)
    assert told("Does it have wheels?", "submarine") == ("n/a", False)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("heron", "heron (bird): yes to Is it alive?"),
        ("Does it fly", "Does it fly? Yes: "),
        ("the weather", "Nothing was found."),
    ],
)
def test_a_search_finds_nouns_and_facts(query: str, found: str) -> None:
    assert offline.search([user(query)], {"answer": "sofa"}).startswith(found)


def test_a_search_does_not_know_the_secret() -> None:
    queries = ["heron", "Does it fly", "the secret"]
    first, second = (
        [offline.search([user(query)], {"answer": secret}) for query in queries]
        for secret in ("heron", "sofa")
    )
    assert first == second
