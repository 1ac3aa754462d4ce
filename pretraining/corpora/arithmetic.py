"""Conversations that solve small word problems and end with "#### N"."""

import re
from dataclasses import dataclass
from random import Random

from pretraining.corpora.conversation import Conversation, Exam, assistant, draw, user, words

NAMES = words("Tom Anna Ben Lily Sam Mia Max Ella Leo Ida Finn Nora")
ITEMS = words("apples books coins stamps pens cards shells balls eggs cups plums keys")
TRAIN, TEST = 1000, 256


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and its solution in one or two steps."""

    text: str
    steps: tuple[tuple[int, str, int, int], ...]
    """(left, operator, right, result) of each step; the last result is the answer."""

    @property
    def answer(self) -> int:
        return self.steps[-1][3]


def draw_problem(rng: Random) -> Problem:
    name, item, kind = rng.choice(NAMES), rng.choice(ITEMS), rng.randrange(6)
    a, b = rng.randint(2, 12), rng.randint(2, 9)
    if kind == 0:
        text = f"{name} has {a} {item} and buys {b} more."
        steps = ((a, "+", b, a + b),)
    elif kind == 1:
        text = f"{name} had {a} {item} yesterday and gets {b} more today."
        steps = ((a, "+", b, a + b),)
    elif kind == 2:
        text = f"{name} has {a + b} {item} and gives away {b}."
        steps = ((a + b, "-", b, a),)
    elif kind == 3:
        text = f"{name} has {a + b} {item} and loses {a}."
        steps = ((a + b, "-", a, b),)
    elif kind == 4:
        boxes = rng.randint(2, 5)
        text = f"{name} has {boxes} boxes with {b} {item} each."
        steps = ((boxes, "*", b, boxes * b),)
    else:
        c = rng.randint(2, min(9, a + b - 1))
        text = f"{name} has {a} {item}, buys {b} more and gives away {c}."
        steps = ((a, "+", b, a + b), (a + b, "-", c, a + b - c))
    return Problem(f"{text} How many {item} does {name} have?", steps)


def examples() -> list[dict[str, str | int]]:
    """Return the rows of datasets/arithmetic.jsonl; no question appears twice."""
    rng, problems = Random("arithmetic"), dict[str, int]()
    while len(problems) < TRAIN + TEST:
        made = draw_problem(rng)
        problems[made.text] = made.answer
    return [
        {"question": text, "answer": answer, "split": "train" if row < TRAIN else "test"}
        for row, (text, answer) in enumerate(problems.items())
    ]


def question(text: str) -> str:
    return f"{text} End with #### and the number."


def reward(answer: str, wanted: int) -> float:
    found = re.search(r"####\s*(-?\d+)", answer)
    return float(found is not None and int(found[1]) == wanted)


class ArithmeticCorpus:
    """Word problems; no document contains a held-out problem."""

    def __init__(self) -> None:
        self._held_out = {row["question"]: row["answer"] for row in examples()[TRAIN:]}

    def document(self, rng: Random, noise: float) -> Conversation:
        made = draw_problem(rng)
        while made.text in self._held_out:
            made = draw_problem(rng)
        answer = _wrong(made, rng) if rng.random() < noise else _worked(made.steps)
        return Conversation([user(question(made.text)), assistant(answer)])

    def exam(self, index: int) -> Exam:
        text, wanted = list(self._held_out.items())[index % TEST]
        return reward((yield Conversation([user(question(str(text)))])), int(wanted))


def _worked(steps: tuple[tuple[int, str, int, int], ...]) -> str:
    lines = [f"{left} {operator} {right} = {result}." for left, operator, right, result in steps]
    return " ".join([*lines, f"#### {steps[-1][3]}"])


def _wrong(made: Problem, rng: Random) -> str:
    left, operator, right, result = made.steps[0]
    off = max(0, result + rng.choice([-2, -1, 1, 2]))
    other = left + right if operator == "-" else abs(left - right)
    return draw(
        rng,
        (30, f"#### {rng.randint(1, 25)}"),
        (25, f"I think it is {off}. #### {off}"),
        (15, _worked(((left, operator, right, off),))),
        (15, _worked(((left, "+" if operator == "-" else "-", right, other),))),
        (15, "I do not know."),
    )
