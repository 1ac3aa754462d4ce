"""The OpenAPI document of the door: exactly the requests and answers that it reads and writes."""

from functools import cache, reduce
from pathlib import Path

from adapters.calls import JsonObject
from adapters.dialects.field_rules import Api, schemas_of
from adapters.yaml_text import read_yaml

PATH = "/openapi.json"
PARTS = ("openapi", "openai_chat", "openai_responses", "anthropic_messages")
"""The YAML files: the frame, and one of each dialect beside the module of the same name."""

BODIES = {
    "ChatRequest": Api.CHAT,
    "ResponsesRequest": Api.RESPONSES,
    "MessagesRequest": Api.MESSAGES,
}
"""The schema of each API's bodies."""


def document(address: str) -> JsonObject:
    """Return the document for the base URL `address`, which may lack its host."""
    return {**_read_parts(), "servers": [{"url": address}]}


@cache
def _read_parts() -> JsonObject:
    files = (Path(__file__).with_name(f"{part}.yaml") for part in PARTS)
    read = (read_yaml(file.read_text(encoding="utf-8")) for file in files)
    return reduce(_join, [*read, {"components": {"schemas": _others()}}])


def _others() -> JsonObject:
    """Describe the fields that are not honoured: the harmless ones, and those that are refused."""
    return {
        name: {"properties": schemas_of(api), "additionalProperties": {"type": "null"}}
        for name, api in BODIES.items()
    }


def _join(one: JsonObject, other: JsonObject) -> JsonObject:
    """Join two documents and the objects in them; ValueError if both have a value of one name."""
    joined = {**one, **other}
    for name in one.keys() & other.keys():
        before, value = one[name], other[name]
        if not isinstance(before, dict) or not isinstance(value, dict):
            raise ValueError(f"two files of the door's document define {name!r}; rename one")
        joined[name] = _join(before, value)
    return joined
