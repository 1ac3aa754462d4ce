"""What the door answers, as an OpenAPI document: what its readers accept, no more and no less."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PATH = "/openapi.json"
PARTS = ("openapi", "openai_chat", "openai_responses", "anthropic_messages")
"""The frame, and what each dialect adds: each a file beside the module of its name."""


def document(address: str) -> dict[str, Any]:
    """The document of the base URL `address`, which may be without its host."""
    return {**_whole(), "servers": [{"url": address}]}


@cache
def _whole() -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in PARTS:
        text = Path(__file__).with_name(f"{part}.yaml").read_text(encoding="utf-8")
        whole = _joined(whole, yaml.safe_load(text))
    return whole


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, objects joined; ValueError where both say something of the same place."""
    joined = dict(one)
    for name, value in other.items():
        if name not in joined:
            joined[name] = value
        elif isinstance(value, dict) and isinstance(joined[name], dict):
            joined[name] = _joined(joined[name], value)
        else:
            raise ValueError(f"two files of the door's document say {name!r}; name one otherwise")
    return joined
