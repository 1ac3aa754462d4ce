"""The door, asked by requests that its document allows, and by as many that it forbids.

`FUZZ` says how many requests are sent (`make fuzz`: 10,000).
"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import httpx
import pytest
from schemathesis import Case

from ratchet.adapters.calls import POLICY
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.harness.player import Batch
from tests.support.door.door_batches import bearer
from tests.support.door.recording_sampler import RecordedRollouts
from tests.support.door.requests_from_document import complaint, drawn, written
from tests.support.door.stand_in import CHAT, StandIn, tool_call, turn
from tests.support.door.token_identity import differences

MANY = int(os.environ.get("FUZZ", "64"))
A_ROLLOUT = 20
AT_ONCE = 8
FIRST = range(20, 200)
"""Tokens of text. An answer begins with one that no other of its rollout has, since equal answers
to equal prompts could not be told apart.
"""
HANGS = 120
"""Seconds without a byte, after which the door counts as hanging."""

pytestmark = pytest.mark.timeout(max(300, MANY))


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


async def send_all(cases: Sequence[Case], to: list[Endpoint]) -> tuple[list[str], Counter[int]]:
    """Send requests; return what was wrong with which, and how often each status was answered."""
    free, bad, statuses = asyncio.Semaphore(AT_ONCE), list[str](), Counter[int]()

    async def send(client: httpx.AsyncClient, number: int, case: Case) -> None:
        endpoint = to[number // A_ROLLOUT]
        try:
            async with free:
                response = await client.send(
                    written(case, endpoint["base_url"], bearer(endpoint["api_key"]))
                )
        except httpx.TimeoutException as error:
            bad.append(f"{number} hangs: {error!r}")
            return
        statuses[response.status_code] += 1
        if wrong := undecent(response) or complaint(case, response):
            bad.append(f"{number}: {wrong}")

    async with httpx.AsyncClient(timeout=HANGS) as client:
        await asyncio.gather(*(send(client, *numbered) for numbered in enumerate(cases)))
    return bad, statuses


def test_what_the_document_allows_and_forbids_is_answered_as_it_says_and_trained_as_sampled(
    tmp_path: Path,
) -> None:
    found: list[tuple[list[str], Counter[int]]] = []
    answers = count()

    def play(batch: Batch, rollouts: Sequence[str]) -> None:
        to = [batch.endpoints(rollout)[POLICY] for rollout in rollouts]
        found.append(asyncio.run(send_all(drawn(MANY), to)))

    def write(chosen: random.Random, *_: object) -> list[int]:
        said = turn(chosen) if chosen.random() < 0.7 else tool_call("look", '{"at": 1}')
        return [FIRST[next(answers) % len(FIRST)], *said]

    sent = RecordedRollouts(tmp_path, MANY // A_ROLLOUT + 1, StandIn(write), CHAT, play)
    ((bad, statuses),) = found
    assert bad == []
    assert differences(sent.trajectories, sent.calls) == []
    assert statuses[200] > MANY / 5
    assert statuses[200] + statuses[400] == MANY
