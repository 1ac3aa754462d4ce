"""Sentences about people, whose names and cities differ between the splits."""

import json
from random import Random

NAMES = {
    "train": ["Ella", "Ben", "Mia", "Tom", "Anna", "Leo", "Nora", "Max", "Ida", "Sam", "Lily"],
    "validation": ["Clara", "Hugo", "Ruth", "Oscar"],
    "test": ["Emma", "Paul", "Alice", "Henry"],
}
CITIES = {
    "train": ["Rome", "Paris", "Oslo", "Lima", "Cairo", "Madrid", "Vienna", "Tokyo", "Delhi"],
    "validation": ["Berlin", "Dublin", "Milan"],
    "test": ["London", "Athens", "Prague"],
}
JOBS = ["baker", "nurse", "pilot", "teacher", "farmer", "painter", "singer", "driver"]
SENTENCES = [
    "{name} is {age} years old and lives in {city}.",
    "{name}, a {job} from {city}, turned {age} last week.",
    "In {city} there is a {job} called {name}, who is {age}.",
    "My friend {name} works as a {job} in {city}. We are both {age}.",
    "At the age of {age}, {name} moved to {city} to become a {job}.",
]
AGES = range(18, 81)
QUESTION = (
    "{text}\nWrite a JSON object with name (a string), age (a number) and city (a string), and "
    "nothing else."
)
"""What `agents/json_fields.py` asks."""
SIZES = {"train": 400, "validation": 128, "test": 128}


def examples() -> list[dict[str, str | int]]:
    """Return the rows of datasets/people.jsonl; no text appears twice."""
    random = Random("people")
    rows: dict[str, dict[str, str | int]] = {}
    for split, size in SIZES.items():
        end = len(rows) + size
        while len(rows) < end:
            row = {
                "name": random.choice(NAMES[split]),
                "age": random.choice(AGES),
                "city": random.choice(CITIES[split]),
            }
            text = random.choice(SENTENCES).format(**row, job=random.choice(JOBS))
            rows.setdefault(text, {"text": text, **row, "split": split})
    return [*rows.values()]


def texts() -> list[dict[str, object]]:
    """Return the rows of datasets/people_texts.jsonl: what the agent asks, and the right answer."""
    return [
        {
            "prompt": QUESTION.format(text=row["text"]),
            "completion": _answer(row),
            "split": row["split"],
        }
        for row in examples()
    ]


def pairs() -> list[dict[str, object]]:
    """Return the rows of datasets/people_pairs.jsonl: the right answer, and a mistaken one."""
    random = Random("people pairs")
    return [
        {
            "prompt": QUESTION.format(text=row["text"]),
            "chosen": _answer(row),
            "rejected": random.choice(_mistakes(row)),
            "split": row["split"],
        }
        for row in examples()
    ]


def _answer(row: dict[str, str | int]) -> str:
    return json.dumps({key: row[key] for key in ("name", "age", "city")})


def _mistakes(row: dict[str, str | int]) -> list[str]:
    """Return answers that earn nothing: more than an object, other keys, other types, or prose."""
    return [
        f"```json\n{_answer(row)}\n```",
        f"Here is the JSON object:\n{_answer(row)}",
        json.dumps({"name": row["name"], "age": str(row["age"]), "city": row["city"]}),
        json.dumps({"name": row["name"], "city": row["city"]}),
        json.dumps({"person": {"name": row["name"], "age": row["age"], "city": row["city"]}}),
        f"The name is {row['name']}, the age is {row['age']} and the city is {row['city']}.",
    ]
