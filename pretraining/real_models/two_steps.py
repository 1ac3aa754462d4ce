"""Word problems of two steps, whose names, things and numbers differ between the splits."""

from itertools import product
from random import Random

NAMES = {
    "train": ["Ella", "Ben", "Mia", "Tom", "Anna", "Leo", "Nora", "Max", "Ida", "Sam", "Lily"],
    "validation": ["Clara", "Hugo", "Ruth", "Oscar"],
    "test": ["Emma", "Paul", "Alice", "Henry"],
}
THINGS = {
    "train": ["apples", "books", "cards", "coins", "cups", "eggs", "stamps"],
    "validation": ["keys", "plums", "shells"],
    "test": ["balls", "boxes", "pens"],
}
CHANGES = ["finds {more} more and loses {less}", "buys {more} more and sells {less}"]
MOST = 9
SHOWN = {(3, 7, 5), (4, 2, 1), (8, 4, 3)}
"""Numbers of the solved problems that the agent shows; no split has them."""
SIZES = {"train": 320, "validation": 96, "test": 96}


def examples() -> list[dict[str, str | int]]:
    """Return the rows of datasets/two_steps.jsonl; no three numbers appear twice in this order."""
    random = Random("two steps")
    numbers = [
        (first, more, less)
        for first, more, less in product(range(2, MOST + 1), range(1, MOST + 1), range(1, MOST + 1))
        if less < first + more and (first, more, less) not in SHOWN
    ]
    splits = [split for split, size in SIZES.items() for _ in range(size)]
    return [
        {
            "question": _question(random, split, first, more, less),
            "answer": first + more - less,
            "split": split,
        }
        for (first, more, less), split in zip(
            random.sample(numbers, len(splits)), splits, strict=True
        )
    ]


def _question(random: Random, split: str, first: int, more: int, less: int) -> str:
    name, thing = random.choice(NAMES[split]), random.choice(THINGS[split])
    change = random.choice(CHANGES).format(more=more, less=less)
    return f"{name} has {first} {thing}, {change}. How many now?"
