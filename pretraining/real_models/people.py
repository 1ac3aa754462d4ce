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
            "completion": json.dumps({key: row[key] for key in ("name", "age", "city")}),
            "split": row["split"],
        }
        for row in examples()
    ]
