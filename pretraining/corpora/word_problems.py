"""Word problems of one to three steps, written as GSM8K writes them: datasets/gsm8k/.

They are in no corpus: the shipped base model has read none of them.
"""

from dataclasses import dataclass
from operator import add, floordiv, mul, sub
from pathlib import Path
from random import Random

from pretraining.corpora.conversation import words
from ratchet.adapters.yaml_text import read_yaml

STORIES = Path(__file__).with_suffix(".yaml")
NAMES = words("Amir Bea Carl Dora Emil Fay Greta Hugo Iris Jonas Kira Lars Mona Nils Olga Pablo")
OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}
SPLITS = {"train": 4, "test": 1}
"""Problems of each story in a split."""


@dataclass(frozen=True)
class Story:
    """A story with numbers a, b, c, d, and the steps of its solution, as in STORIES."""

    question: str
    numbers: dict[str, list[int] | str]
    steps: list[str]

    def problem(self, rng: Random) -> dict[str, str]:
        values: dict[str, int] = {}
        for name, drawn in self.numbers.items():
            computed = isinstance(drawn, str)
            values[name] = _calculate(drawn, values)[1] if computed else rng.randint(*drawn)
        who = {"name": rng.choice(NAMES)}
        lines: list[str] = []
        for result, step in zip("xyz", self.steps, strict=False):
            formula = step[step.index("[") + 1 : step.index("]")]
            written, values[result] = _calculate(formula, values)
            solved = f"{written}=<<{written}={values[result]}>>{values[result]}"
            lines.append(step.replace(f"[{formula}]", solved).format(**who, **values))
        answer = values["xyz"[len(lines) - 1]]
        question = self.question.format(**who, **values)
        return {"question": question, "answer": "\n".join([*lines, f"#### {answer}"])}


def examples() -> dict[str, list[dict[str, str]]]:
    """Return the rows of datasets/gsm8k/ by split; no question appears twice."""
    rng, asked = Random("word problems"), set[str]()
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for story in read_yaml(STORIES.read_text(encoding="utf-8")):
        for split, count in SPLITS.items():
            for _ in range(count):
                problem = Story(**story).problem(rng)
                while problem["question"] in asked:
                    problem = Story(**story).problem(rng)
                asked.add(problem["question"])
                rows[split].append(problem)
    for split in rows.values():
        rng.shuffle(split)
    return rows


def _calculate(formula: str, values: dict[str, int]) -> tuple[str, int]:
    """Write out a formula of two numbers, such as "a * 3"; return it with its result."""
    left, sign, right = (str(values.get(word, word)) for word in formula.split())
    return f"{left}{sign}{right}", OPERATORS[sign](int(left), int(right))
