"""Long requests: they hold no other up, and are numbered as they come."""

import asyncio
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.door.door import Door
from ratchet.adapters.process.event_loop import SHORT_TEXT
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.renderer_names import TEMPLATE
from tests.support.door.door_batches import bearer
from tests.support.door.opened_door import ASK, TINY, Opened, opened_batch

SLOW = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>"
    "{% if message.content | length > 9 %}{% for row in range(9) %}{% for one in range(30000) %}"
    "{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
"""A template that takes a long time for a long message."""
LONG: Any = [{"role": "user", "content": "x" * (SHORT_TEXT + 1)}]


async def send(opened: Opened, *bodies: dict[str, Any]) -> list[str]:
    """Send requests at once to the application itself; return the ids as they are answered."""
    answered: list[str] = []
    transport = httpx.ASGITransport(opened.door.app)
    async with httpx.AsyncClient(transport=transport, headers=bearer(opened.key)) as client:

        async def ask(name: str, body: dict[str, Any]) -> None:
            response = await client.post(f"{opened.url}/chat/completions", json=body, timeout=None)
            assert response.status_code == 200, response.text
            answered.append(name)

        await asyncio.gather(*(ask(str(number), body) for number, body in enumerate(bodies)))
    return answered


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
def test_a_text_that_the_context_cannot_hold_is_refused_by_its_length(
    opened: Opened, path: str
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{**ASK[0], "content": "x" * 100_000}]}
    said = httpx.post(f"{opened.url}/{path}", json=body, headers=bearer(opened.key), timeout=None)
    assert said.status_code == 400
    assert "is 400 tokens, and the messages have 100000 characters" in said.text


def test_a_long_prompt_is_rendered_while_others_are_answered() -> None:
    chat = Chat(AutoTokenizer.from_pretrained(TINY), TEMPLATE + SLOW, context=10**6)
    with Door(chat, {}, run_seed=7) as door, opened_batch(door) as opened:
        slow, quick = {"model": "m", "messages": LONG}, {"model": "m", "messages": ASK}
        assert asyncio.run(send(opened, slow, quick)) == ["1", "0"]
        assert {len(s.request.messages[0]["content"]): s.id.number for s in opened.spans} == {
            SHORT_TEXT + 1: 0,
            len(ASK[0]["content"]): 1,
        }


def test_a_long_body_is_read_before_those_behind_it(opened: Opened) -> None:
    long = {"model": "m", "messages": ASK, "metadata": {"note": "x" * 2_000_000}}
    asyncio.run(send(opened, long, {"model": "m", "messages": [{**ASK[0], "content": "b"}]}))
    numbers = {span.request.messages[0]["content"]: span.id.number for span in opened.spans}
    assert numbers == {ASK[0]["content"]: 0, "b": 1}


def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(opened: Opened) -> None:
    said = opened.post(b'{"x": [' + b"[]," * 600_000 + b"[]]}")
    assert (said.status_code, said.json()["error"]["code"]) == (413, "body_too_large")
