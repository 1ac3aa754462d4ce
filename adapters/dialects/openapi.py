"""The OpenAPI document of the door: exactly the requests and answers that it reads and writes."""

from functools import cache
from pathlib import Path

import yaml

from adapters.calls import JsonObject

PATH = "/openapi.json"
PARTS = ("openapi", "openai_chat", "openai_responses", "anthropic_messages")
"""The YAML files: the frame, and one of each dialect beside the module of the same name."""


def document(address: str) -> JsonObject:
    """Return the document for the base URL `address`, which may lack its host."""
    return {**_read_parts(), "servers": [{"url": address}]}


@cache
def _read_parts() -> JsonObject:
    whole: JsonObject = {}
    for part in PARTS:
        text = Path(__file__).with_name(f"{part}.yaml").read_text(encoding="utf-8")
        whole = _join(whole, yaml.safe_load(text))
    return whole


def _join(one: JsonObject, other: JsonObject) -> JsonObject:
    """Join two documents and the objects in them; ValueError if both have a value at one place."""
    joined = dict(one)
    for name, value in other.items():
        before = joined.get(name)
        if name not in joined:
            joined[name] = value
        elif isinstance(value, dict) and isinstance(before, dict):
            joined[name] = _join(before, value)
        else:
            raise ValueError(f"two files of the door's document define {name!r}; rename one")
    return joined
