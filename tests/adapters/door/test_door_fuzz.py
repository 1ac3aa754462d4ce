"""The door, asked by its document, and by its clients' request types, some damaged.

`FUZZ` says how many requests are sent of each kind (`make fuzz`: 10,000).
"""

import asyncio
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams
from openai.types.responses.response_create_params import ResponseCreateParams
from pydantic import TypeAdapter

from ratchet.adapters.calls import POLICY
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.dialects.table import DIALECTS
from ratchet.adapters.harness.player import Batch
from tests.support.door.door_batches import bearer
from tests.support.door.recording_sampler import RecordedRollouts
from tests.support.door.requests_from_document import complaint, drawn, written
from tests.support.door.requests_from_schema import Drawn
from tests.support.door.stand_in import CHAT, StandIn, tool_call, turn
from tests.support.door.token_identity import differences

BY_DOCUMENT = int(os.environ.get("FUZZ", "64"))
BY_TYPES = int(os.environ.get("FUZZ", "999"))
A_ROLLOUT = 20
AT_ONCE = 8
FIRST = range(20, 200)
"""Tokens of text. An answer begins with one that no other of its rollout has, since equal answers
to equal prompts could not be told apart.
"""
HANGS = 120
"""Seconds without a byte, after which the door counts as hanging."""

pytestmark = pytest.mark.timeout(max(300, BY_DOCUMENT))
log = logging.getLogger(__name__)

Complain = Callable[[httpx.Response], str]
"""Says what is wrong with the answer to a request; empty if nothing is."""

Ask = Callable[[int, Endpoint], tuple[httpx.Request, Complain]]
"""Makes the request of a number, to an endpoint."""

AskBy = Callable[[Endpoint], Ask]
"""Makes the requests for a door, by one of its endpoints."""


def schemas() -> dict[str, dict[str, Any]]:
    """Map each path to the JSON schema of what a client may send there."""
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
    "/openapi.json",
)


def by_type(number: int, to: Endpoint) -> tuple[httpx.Request, Complain]:
    """Make a request that clients' types allow, or nearly do."""
    chosen = random.Random(number)
    path = [*SCHEMAS][number % len(SCHEMAS)]
    drawn = Drawn(SCHEMAS[path], number)
    body = drawn.body()
    content = drawn.written(drawn.damaged(body) if chosen.random() < 0.5 else body)
    headers = {**bearer(to["api_key"]), "content-type": "application/json"}
    if chosen.random() < 0.2:
        headers |= chosen.choice(ODD_HEADERS)
    if chosen.random() < 0.1:
        path = chosen.choice(ODD_PATHS)
    method = "POST" if chosen.random() < 0.95 else chosen.choice(("GET", "PUT", "DELETE", "PATCH"))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return httpx.Request(method, to["base_url"] + path, content=content, headers=raw), undecent


def undecent(response: httpx.Response) -> str:
    """Return the response as text, unless it is a whole answer or a refusal with a reason."""
    try:
        if "event-stream" in response.headers["content-type"]:
            lines = response.text.splitlines()
            data = [line[6:] for line in lines if line.startswith("data: ")]
            decent = bool(data) and all(part == "[DONE]" or json.loads(part) for part in data)
        elif response.status_code == 200:
            decent = isinstance(response.json(), dict)
        else:
            said = bool(response.json()["error"]["message"])
            decent = 400 <= response.status_code < 500 and said
    except ValueError:
        decent = False
    return "" if decent else f"{response.status_code} {response.text[:500]}"


async def send_all(many: int, ask: Ask, to: list[Endpoint]) -> tuple[list[str], Counter[int]]:
    """Send requests; return what was wrong with which, and how often each status was answered."""
    free, bad, statuses = asyncio.Semaphore(AT_ONCE), [], Counter()

    async def send(client: httpx.AsyncClient, number: int) -> None:
        request, complain = ask(number, to[number // A_ROLLOUT])
        try:
            async with free:
                response = await client.send(request)
        except httpx.TimeoutException as error:
            bad.append(f"{number} hangs: {error!r}")
            return
        statuses[response.status_code] += 1
        if wrong := undecent(response) or complain(response):
            bad.append(f"{number}: {wrong}")

    async with httpx.AsyncClient(timeout=HANGS) as client:
        await asyncio.gather(*(send(client, number) for number in range(many)))
    return bad, statuses


def fuzz(folder: Path, many: int, ask_by: AskBy) -> Counter[int]:
    """Send so many requests; return their statuses.

    All must be answered well, and trained as sampled.
    """
    found: list[tuple[list[str], Counter[int]]] = []

    def play(batch: Batch, rollouts: Sequence[str]) -> None:
        to = [batch.endpoints(rollout)[POLICY] for rollout in rollouts]
        ask, started = ask_by(to[0]), time.monotonic()
        found.append(asyncio.run(send_all(many, ask, to)))
        seconds = time.monotonic() - started
        log.info("%d requests, %d bad, %.0f s: %s", many, len(found[0][0]), seconds, found[0][1])

    answers = count()

    def write(chosen: random.Random, *_: object) -> list[int]:
        said = turn(chosen) if chosen.random() < 0.7 else tool_call("look", '{"at": 1}')
        return [FIRST[next(answers) % len(FIRST)], *said]

    sent = RecordedRollouts(folder, many // A_ROLLOUT + 1, StandIn(write), CHAT, play)
    ((bad, statuses),) = found
    assert bad == []
    assert differences(sent.trajectories, sent.calls) == []
    return statuses


def by_document(_: Endpoint) -> Ask:
    """Make requests that the document allows, and as many that it forbids."""
    cases = drawn(BY_DOCUMENT)

    def ask(number: int, to: Endpoint) -> tuple[httpx.Request, Complain]:
        case = cases[number]
        return written(case, to["base_url"], bearer(to["api_key"])), lambda response: complaint(
            case, response
        )

    return ask


def test_every_path_that_the_door_answers_is_fuzzed() -> None:
    if "/messages" not in SCHEMAS:
        pytest.skip("Anthropic's client is not installed, so the schema of its path is not known")
    assert SCHEMAS.keys() == DIALECTS.keys()


def test_what_the_document_allows_and_forbids_is_answered_as_it_says(tmp_path: Path) -> None:
    statuses = fuzz(tmp_path, BY_DOCUMENT, by_document)
    assert statuses[200] > BY_DOCUMENT / 5
    assert statuses[200] + statuses[400] == BY_DOCUMENT


def test_whatever_clients_may_send_is_answered_or_refused(tmp_path: Path) -> None:
    statuses = fuzz(tmp_path, BY_TYPES, lambda _: by_type)
    assert statuses[200] > BY_TYPES / 20
