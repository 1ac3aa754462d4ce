"""A judge of hello's answers: the model that a recipe's role `judge` has, as a function.

It prefers the answer that claims the identity of the question, and of two that do, or do not, none.
"""

import re
from typing import Any

from hello import reward

ANSWERS = re.compile(r"A: (?P<A>.*?)\nB: (?P<B>.*?)\n[^\n]*Answer A, B or Tie\.", re.S)


def compare(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Say which of two answers is better, as `judge:pairs` asks it."""
    answers = ANSWERS.search(messages[-1]["content"])
    if answers is None:
        return "There are no two answers."
    identity = example["example"]["identity"]
    first, second = (reward(answers[name], identity) for name in "AB")
    return "Tie" if first == second else "A" if first > second else "B"


def prefer_first(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Say A, whatever it is."""
    return "A"
