"""Formats whose check would take hours or gigabytes: no rollout waits for them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.door.door import Door
from ratchet.adapters.rendering.chat import Chat
from tests.support.door.opened_door import TINY, Opened, opened_batch

pytestmark = pytest.mark.timeout(60)


@contextmanager
def two_rollouts() -> Iterator[tuple[Opened, Opened]]:
    """Open a door, whose model reads prompts of any length, with two rollouts being played."""
    chat = Chat(AutoTokenizer.from_pretrained(TINY))
    with (
        Door(chat, {}, run_seed=7) as door,
        opened_batch(door) as first,
        opened_batch(door) as second,
    ):
        yield first, second


def as_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def doubling(depth: int) -> dict[str, Any]:
    """Return a schema with 2^depth ways to its last definition."""
    defs: dict[str, Any] = {str(depth): {"type": "object"}}
    for i in range(depth):
        deeper = {"$ref": f"#/$defs/{i + 1}"}
        defs[str(i)] = {"anyOf": [deeper, {"allOf": [deeper]}]}
    return {"$ref": "#/$defs/0", "$defs": defs}


def test_an_answer_that_cannot_be_checked_in_time_is_recorded_as_unchecked() -> None:
    with two_rollouts() as (first, second), ThreadPoolExecutor() as threads:
        first.say("3<|im_end|>")
        asked = threads.submit(first.ask, response_format=as_format(doubling(24)))
        while not asked.done():
            assert second.ask().choices, "the other rollout is answered meanwhile"
        assert asked.result().choices[0].message.content == "3"
        outcome: Any = first.spans[0].outcomes["format"]
        assert outcome["valid"] is None
        assert "may take 1 s of processor time" in outcome["error"]
        first.ask(response_format=as_format({"type": "integer"}))
        assert first.spans[1].outcomes["format"] == {
            "kind": "json_schema",
            "valid": True,
            "error": None,
        }


def test_a_schema_that_cannot_be_read_in_time_is_refused() -> None:
    schema = doubling(30)
    for definition in schema["$defs"].values():
        definition["unevaluatedProperties"] = False
    with two_rollouts() as (first, _):
        with pytest.raises(openai.BadRequestError, match="cannot be used: not checked"):
            first.ask(response_format=as_format(schema))
        assert first.ask().choices
