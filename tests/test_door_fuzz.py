"""The door, asked for anything: by the schemas of its clients' own request types, and damaged.

`FUZZ` says how many requests are sent (`make fuzz`: 10,000).
"""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams
from openai.types.responses.response_create_params import ResponseCreateParams
from pydantic import TypeAdapter

from adapters.dialects import DIALECTS
from adapters.door import Door
from tests.requests_from_schema import Drawn
from tests.stand_in import CHAT, StandIn, tool_call, turn
from tests.token_identity import differences
from tests.witness import TOKEN, Witnessed

REQUESTS = int(os.environ.get("FUZZ", "999"))
A_ROLLOUT = 20
AT_ONCE = 8
HANGS = 120
"""Seconds without a byte, after which the door counts as hanging."""


def schemas() -> dict[str, dict[str, Any]]:
    """Path → the JSON schema of what a client may send there."""
    types: dict[str, Any] = {
        "/chat/completions": CompletionCreateParams,
        "/responses": ResponseCreateParams,
    }
    try:
        from anthropic.types.message_create_params import MessageCreateParams
    except ImportError:
        pass
    else:
        types["/messages"] = MessageCreateParams
    return {path: TypeAdapter(kind).json_schema() for path, kind in types.items()}


SCHEMAS = schemas()
ODD_HEADERS: tuple[dict[str, str], ...] = (
    {"x-stainless-retry-count": "1"},
    {"x-stainless-retry-count": "²"},
    {"x-stainless-retry-count": "9" * 5000},
    {"content-type": "text/plain; charset=utf-16"},
    {"accept": "text/event-stream"},
    {"anthropic-version": "x"},
    {"authorization": "é"},
    {"authorization": ""},
    {"x-api-key": "\xff"},
)
ODD_PATHS = (
    "",
    "/",
    "/models",
    "/embeddings",
    "/../models",
    "/%00",
    "/responses/abc",
    "/v1/models",
)


def request(number: int, url: str) -> httpx.Request:
    """The `number`-th request, always the same one."""
    chosen = random.Random(number)
    path = [*SCHEMAS][number % len(SCHEMAS)]
    drawn = Drawn(SCHEMAS[path], number)
    body = drawn.body()
    content = drawn.written(drawn.damaged(body) if chosen.random() < 0.5 else body)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    if chosen.random() < 0.2:
        headers |= chosen.choice(ODD_HEADERS)
    if chosen.random() < 0.1:
        path = chosen.choice(ODD_PATHS)
    method = "POST" if chosen.random() < 0.95 else chosen.choice(("GET", "PUT", "DELETE", "PATCH"))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return httpx.Request(method, url + path, content=content, headers=raw)


async def send_all(urls: list[str]) -> list[str]:
    """The numbers of the requests that had no decent answer, and what they had."""
    free, bad, statuses = asyncio.Semaphore(AT_ONCE), [], Counter()

    async def send(client: httpx.AsyncClient, number: int) -> None:
        async with free:
            response = await client.send(request(number, urls[number // A_ROLLOUT]))
        statuses[response.status_code] += 1
        if not is_decent(response):
            bad.append(f"{number}: {response.status_code} {response.text[:500]}")

    async with httpx.AsyncClient(timeout=HANGS) as client:
        await asyncio.gather(*(send(client, number) for number in range(REQUESTS)))
    assert statuses[200] > REQUESTS / 20, statuses
    return bad


def is_decent(response: httpx.Response) -> bool:
    """Whether it is a whole answer, or a refusal that says why, in JSON."""
    try:
        if "event-stream" in response.headers["content-type"]:
            lines = response.text.splitlines()
            data = [line[6:] for line in lines if line.startswith("data: ")]
            return bool(data) and all(part == "[DONE]" or json.loads(part) for part in data)
        body = response.json()
    except ValueError:
        return False
    if response.status_code == 200:
        return isinstance(body, dict)
    return 400 <= response.status_code < 500 and bool(body["error"]["message"])


def test_every_path_that_the_door_answers_is_fuzzed() -> None:
    if "/messages" not in SCHEMAS:
        pytest.skip("Anthropic's client is not installed, so the schema of its path is not known")
    assert SCHEMAS.keys() == DIALECTS.keys()


def test_whatever_is_sent_is_answered_or_refused_and_trained_as_sampled(tmp_path: Path) -> None:
    rollouts = [f"train-00000-{n:04d}-00" for n in range(REQUESTS // A_ROLLOUT + 1)]
    bad = []

    def play(door: Door) -> None:
        bad.extend(asyncio.run(send_all([door.url(rollout, 0) for rollout in rollouts])))

    def write(chosen: random.Random, *_: object) -> list[int]:
        return turn(chosen) if chosen.random() < 0.7 else tool_call("look", '{"at": 1}')

    sent = Witnessed(tmp_path, rollouts, StandIn(write), CHAT, play)
    assert bad == []
    assert differences(sent.trajectories, sent.calls) == []
