"""Streams whose answers take long: their clients are told that somebody is there."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.adapters.door import chat_api
from tests.support.door.door_batches import bearer
from tests.support.door.opened_door import ASK, CHAT, Opened

SAID = "Let me see."
GENERATE = "/v1beta/models/m:streamGenerateContent?alt=sse"
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"model": "m", "messages": ASK},
    "/responses": {"model": "m", "input": ASK},
    "/messages": {"model": "m", "messages": ASK, "max_tokens": 100},
    GENERATE: {"contents": [{"parts": [{"text": "hello"}]}]},
}
WORDS = {
    "/chat/completions": ": sampling",
    "/responses": '"type": "keepalive"',
    "/messages": 'data: {"type": "ping"}',
    GENERATE: '"parts": [{"text": ""}]',
}


@pytest.fixture
def slow(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A sampler that takes several times as long as a client is left without a word."""
    monkeypatch.setattr(chat_api, "WORD_SECONDS", 0.05)

    async def hold() -> None:
        await asyncio.sleep(0.4)

    opened.sampler.hold = hold
    opened.say(f"{SAID}<|im_end|>")
    return opened


def stream(slow: Opened, path: str) -> httpx.Response:
    body = BODIES[path] if path == GENERATE else {**BODIES[path], "stream": True}
    return httpx.post(slow.url + path, json=body, headers=bearer(slow.key), timeout=60)


@pytest.mark.parametrize("path", BODIES)
def test_a_waiting_client_gets_words_and_then_the_answer(slow: Opened, path: str) -> None:
    late = stream(slow, path)
    assert late.text.count(WORDS[path]) >= 2
    assert late.headers["x-request-id"] == slow.spans[0].response_id
    numbers = [
        json.loads(line.removeprefix("data: "))["sequence_number"]
        for line in late.text.splitlines()
        if "sequence_number" in line
    ]
    assert numbers == list(range(len(numbers)))


def by_chat(slow: Opened) -> object:
    with slow.client.chat.completions.stream(model="m", messages=ASK) as streaming:
        return streaming.get_final_completion().choices[0].message.content


def by_responses(slow: Opened) -> object:
    with slow.client.responses.stream(model="m", input=ASK) as streaming:
        return streaming.get_final_response().output_text


def by_messages(slow: Opened) -> object:
    with (
        anthropic.Anthropic(base_url=slow.url, api_key=slow.key, max_retries=0) as client,
        client.messages.stream(model="m", messages=ASK, max_tokens=100) as streaming,
    ):
        return streaming.get_final_text()


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_the_stream_helpers_of_clients_put_a_late_answer_together(
    slow: Opened, ask: Callable[[Opened], object]
) -> None:
    assert ask(slow) == SAID
    (span,) = slow.spans
    assert CHAT.decode_answer(span.response_token_ids) == SAID


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/chat/completions", '"type": "server_error"'),
        ("/responses", '"type": "response.failed"'),
        ("/messages", '"type": "error"'),
        (GENERATE, '"status": "INTERNAL"'),
    ],
)
def test_a_late_refusal_ends_the_stream_and_is_recorded(slow: Opened, path: str, last: str) -> None:
    slow.sampler.error = KeyError("oops")
    late = stream(slow, path)
    assert late.status_code == 200
    assert last in late.text.strip().splitlines()[-1]
    assert "The endpoint failed: KeyError" in late.text
    assert len(slow.refusals) == 1


def test_the_answer_of_a_client_that_leaves_meanwhile_is_recorded(slow: Opened) -> None:
    body = {**BODIES["/chat/completions"], "stream": True}
    url, headers = f"{slow.url}/chat/completions", bearer(slow.key)
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        next(answer.iter_text())
    assert slow.spans == []
    again = openai.OpenAI(base_url=slow.url, api_key=slow.key)
    assert again.chat.completions.create(model="m", messages=ASK).choices[0].message.content == SAID
    assert slow.spans[0].request.fields.get("stream") is True
