"""Word problems of one to three steps, written as GSM8K writes them: datasets/gsm8k/.

They are in no corpus: the shipped base model has read none of them.
"""

from dataclasses import dataclass
from operator import add, floordiv, mul, sub
from random import Random

from pretraining.corpora.conversation import words

NAMES = words("Amir Bea Carl Dora Emil Fay Greta Hugo Iris Jonas Kira Lars Mona Nils Olga Pablo")
OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}
SPLITS = {"train": 4, "test": 1}
"""Problems of each kind in a split."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Kind:
    """A story with numbers a, b, c, d, and the steps of its solution.

    A number is drawn from its range, or computed, so that the solution has whole numbers. A step
    is a sentence in which "[a + b]" stands for a calculation; its result is x in the first step, y
    in the second and z in the third.
    """

    question: str
    numbers: dict[str, Range | str]
    steps: tuple[str, ...]

    def problem(self, rng: Random) -> dict[str, str]:
        """Draw the numbers and return the question and its worked answer."""
        values: dict[str, int] = {}
        for name, drawn in self.numbers.items():
            known = isinstance(drawn, str)
            values[name] = _calculate(drawn, values)[1] if known else rng.randint(*drawn)
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
    for kind in KINDS:
        for split, count in SPLITS.items():
            for _ in range(count):
                made = kind.problem(rng)
                while made["question"] in asked:
                    made = kind.problem(rng)
                asked.add(made["question"])
                rows[split].append(made)
    for split in rows.values():
        rng.shuffle(split)
    return rows


def _calculate(formula: str, values: dict[str, int]) -> tuple[str, int]:
    """Write out a formula of two numbers, such as "a * 3"; return it with its result."""
    left, sign, right = (str(values.get(word, word)) for word in formula.split())
    return f"{left}{sign}{right}", OPERATORS[sign](int(left), int(right))


KINDS = (
    Kind(
        "{name} planted {a} bean seeds on Monday and {b} more on Tuesday. How many seeds has "
        "{name} planted in all?",
        {"a": (12, 48), "b": (5, 30)},
        ("In the two days {name} planted [a + b] seeds.",),
    ),
    Kind(
        "A library had {a} books about birds, and readers have borrowed {b} of them. How many"
        " of these books are still there?",
        {"b": (6, 25), "c": (8, 40), "a": "b + c"},
        ("There are [a - b] books about birds still there.",),
    ),
    Kind(
        "{name} pays ${b} for each ticket to the circus and buys {a} tickets. How many "
        "dollars does {name} pay?",
        {"a": (3, 9), "b": (7, 15)},
        ("{a} tickets cost $[a * b].",),
    ),
    Kind(
        "{a} children share {b} marbles so that each of them gets equally many. How many "
        "marbles does each child get?",
        {"a": (3, 8), "c": (4, 12), "b": "a * c"},
        ("Each child gets [b / a] marbles.",),
    ),
    Kind(
        "{name} bakes {a} trays with {b} rolls each and gives {c} rolls to the neighbours. "
        "How many rolls does {name} keep?",
        {"a": (3, 7), "b": (8, 14), "c": (5, 20)},
        ("{name} bakes [a * b] rolls.", "After the gift there are [x - c] rolls left."),
    ),
    Kind(
        "A bus starts with {a} passengers. At the first stop {b} get off, and at the second "
        "stop {c} get on. How many passengers are on the bus now?",
        {"b": (4, 12), "d": (5, 25), "a": "b + d", "c": (3, 15)},
        (
            "After the first stop there are [a - b] passengers.",
            "After the second there are [x + c].",
        ),
    ),
    Kind(
        "{name} earns ${a} an hour and works {b} hours on Saturday and {c} hours on Sunday. "
        "How many dollars does {name} earn at the weekend?",
        {"a": (9, 18), "b": (3, 8), "c": (2, 6)},
        ("{name} works [b + c] hours.", "For these hours the pay is $[x * a]."),
    ),
    Kind(
        "A pen costs ${a} and a notebook costs ${b} more than a pen. How many dollars do one "
        "pen and one notebook cost together?",
        {"a": (2, 6), "b": (1, 5)},
        ("A notebook costs $[a + b].", "Together they cost $[a + x]."),
    ),
    Kind(
        "{name} reads {a} pages a day. How many days does {name} need for a book of {b} "
        "pages, of which {c} pages are read already?",
        {"a": (8, 20), "d": (3, 12), "c": (15, 60), "x": "a * d", "b": "x + c"},
        ("There are [b - c] pages left.", "They take [x / a] days."),
    ),
    Kind(
        "On a farm there are {a} goats and {b} times as many hens. How many animals are these"
        " altogether?",
        {"a": (6, 18), "b": (2, 5)},
        ("There are [a * b] hens.", "Together with the goats that makes [x + a] animals."),
    ),
    Kind(
        "{name} runs {a} kilometres on each of {b} days a week. How many kilometres is that "
        "in {c} weeks?",
        {"a": (3, 9), "b": (2, 6), "c": (3, 8)},
        ("In a week {name} runs [a * b] kilometres.", "In {c} weeks that is [x * c] kilometres."),
    ),
    Kind(
        "A tank holds {a} litres of water. A pump takes out {b} litres a minute. How many "
        "litres are left after {c} minutes?",
        {"b": (4, 12), "c": (3, 9), "d": (10, 60), "x": "b * c", "a": "x + d"},
        ("The pump takes out [b * c] litres.", "There are [a - x] litres left."),
    ),
    Kind(
        "{name} has ${a} and wants to buy {b} plants for ${c} each. How many dollars are missing?",
        {"b": (4, 9), "c": (6, 12), "d": (3, 15), "x": "b * c", "a": "x - d"},
        ("The plants cost $[b * c].", "So $[x - a] are missing."),
    ),
    Kind(
        "In a hall there are {a} rows of {b} seats. On Friday {c} seats stay empty, and each "
        "visitor pays ${d}. How many dollars do the visitors pay?",
        {"a": (6, 12), "b": (8, 15), "c": (4, 20), "d": (3, 9)},
        (
            "The hall has [a * b] seats.",
            "Of these [x - c] are taken.",
            "The visitors pay $[y * d].",
        ),
    ),
    Kind(
        "{name} collects {a} shells in the morning and twice as many in the afternoon, and "
        "then shares all of them equally with two friends. How many shells does each of the "
        "three get?",
        {"a": (7, 30)},
        (
            "In the afternoon {name} finds [a * 2] shells.",
            "That makes [a + x] shells in all.",
            "Each of the three gets [y / 3] shells.",
        ),
    ),
    Kind(
        "A box of {a} pencils costs ${b}. A school needs {c} pencils. How many dollars does "
        "it pay for them, if it orders no more boxes than it needs?",
        {"a": (6, 12), "b": (3, 8), "d": (4, 9), "c": "a * d"},
        ("The school needs [c / a] boxes.", "They cost $[x * b]."),
    ),
    Kind(
        "{name} saves ${a} a week for {b} weeks, and then spends half of the savings on a "
        "jacket. How many dollars does {name} have left?",
        {"a": (4, 20), "c": (2, 6), "b": "c * 2"},
        (
            "{name} saves $[a * b].",
            "The jacket costs $[x / 2].",
            "That leaves $[x - y].",
        ),
    ),
    Kind(
        "A baker uses {a} grams of flour for a small loaf and {b} grams for a large one. How "
        "many grams are needed for {c} small and {d} large loaves?",
        {"a": (200, 400), "b": (450, 800), "c": (2, 8), "d": (2, 6)},
        (
            "The small loaves need [a * c] grams.",
            "The large loaves need [b * d] grams.",
            "Together they need [x + y] grams.",
        ),
    ),
    Kind(
        "{name} is {a} years old. {name}'s aunt is {b} times as old. How old will the aunt be"
        " in {c} years?",
        {"a": (6, 14), "b": (3, 5), "c": (2, 12)},
        ("Today the aunt is [a * b] years old.", "In {c} years she will be [x + c]."),
    ),
    Kind(
        "A lamp costs ${a} in spring and ${b} less in autumn. A hotel buys {c} lamps in "
        "autumn. How many dollars does the hotel pay?",
        {"a": (30, 60), "b": (5, 15), "c": (3, 16)},
        ("In autumn a lamp costs $[a - b].", "{c} lamps cost $[x * c]."),
    ),
)
