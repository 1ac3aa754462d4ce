"""The scripted answerer and search of 20 Questions, offline, from the data set's facts.

In datasets/twenty_questions.csv a column that ends in a question mark is a question, and the cell
is the answer for the row's noun.
"""

import csv
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "datasets" / "twenty_questions.csv"

Noun = dict[str, str]


def answer(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Return the answerer's JSON for the question in the last message and `example["answer"]`."""
    said, correct = verdict(str(messages[-1]["content"]), str(example["answer"]))
    reason = "It is the secret." if correct else "So say the facts."
    return json.dumps({"reason": reason, "yes_or_no": said, "correct": correct})


def search(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Return the table's facts about the noun or the question that the last message names.

    The search does not use the secret, which only the answerer knows.
    """
    query = str(messages[-1]["content"]).lower()
    words = re.findall(r"[a-z]+", query)
    named = [noun for noun in nouns().values() if noun["answer"] in words]
    if named:
        return " ".join(_described(noun) for noun in named[:2])
    asked = [fact for fact in facts() if fact.lower().rstrip("?") in query]
    if asked:
        return " ".join(_listed(fact) for fact in asked[:2])
    return "Nothing was found."


def verdict(asked: str, secret: str) -> tuple[str, bool]:
    """Return yes, no or n/a, and True if the question was the right guess."""
    guess = guessed(asked)
    if guess == secret.lower():
        return "yes", True
    fact = _facts_by_question().get(asked.strip().lower())
    noun = nouns().get(secret)
    if fact and noun:
        return noun[fact], False
    return ("no" if guess else "n/a"), False


def guessed(asked: str) -> str | None:
    """Return the noun of a guess such as "Is it a heron?"."""
    found = re.fullmatch(r"\s*is it an? ([a-z]+)\?\s*", asked.lower())
    return found[1] if found else None


@cache
def nouns() -> dict[str, Noun]:
    """Return the table's rows by noun."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["answer"]: row for row in csv.DictReader(file)}


@cache
def facts() -> list[str]:
    """Return the columns that are questions."""
    return [column for column in next(iter(nouns().values())) if column.endswith("?")]


@cache
def _facts_by_question() -> dict[str, str]:
    return {fact.lower(): fact for fact in facts()}


def _described(noun: Noun) -> str:
    true = [fact for fact in facts() if noun[fact] == "yes"]
    return f"{noun['answer']} ({noun['category']}): yes to {' '.join(true)}"


def _listed(fact: str) -> str:
    matching = [name for name, noun in nouns().items() if noun[fact] == "yes"]
    return f"{fact} Yes: {', '.join(matching[:20])}."
