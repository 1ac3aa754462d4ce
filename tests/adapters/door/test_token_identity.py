"""What is trained is what was sampled: 1,000 rollouts of a policy that says anything at all."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pyarrow as pa
import pytest
from tinker import SamplingParams

from ratchet.adapters.calls import POLICY
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.harness.player import Batch
from tests.support.door.door_batches import bearer
from tests.support.door.recording_sampler import RecordedRollouts
from tests.support.door.stand_in import CHAT, StandIn, anything, letters, tool_call, turn
from tests.support.door.token_identity import differences, reuse

pytestmark = pytest.mark.story

HISTORIES = ("verbatim", "stripped", "tools", "react")
ROLLOUTS = 1000
AT_ONCE = 20
STOP = "\nObservation:"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

Message = dict[str, Any]


def write(chosen: random.Random, params: SamplingParams, prompt: Sequence[int]) -> list[int]:
    """Write a thought up to the stop string, a tool call if there are tools, or anything."""
    if STOP in (params.stop or ()):
        return [*anything(chosen), *letters(f"I look.{STOP}")]
    if CHAT.encode("<tool_call>")[0] in prompt and chosen.random() < 0.8:
        space = " " * chosen.randint(0, 3)
        return tool_call("look", f'{{"b":{space}[1, 2],"a":{space}"{chosen.random()}"}}')
    return turn(chosen)


def asked(history: str, messages: list[Message]) -> dict[str, Any]:
    extra = {"tools": {"tools": TOOLS}, "react": {"stop": STOP}}
    return {"model": "policy", "messages": messages, **extra.get(history, {})}


def repeated(message: Message, history: str) -> list[Message]:
    """Return what the client adds to its history for an answer, in its own spelling."""
    content = message["content"] or ""
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        arguments = json.dumps(json.loads(function["arguments"]), sort_keys=True, indent=1)
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [{"id": "mine", **call}]}
        return [said, {"role": "tool", "content": "a cat", "tool_call_id": "mine"}]
    if history == "react":
        content += f"{STOP} a cat"
    said = message if history == "verbatim" else {"role": "assistant", "content": content.strip()}
    return [said, {"role": "user", "content": "go on"}]


async def play(client: httpx.AsyncClient, endpoint: Endpoint, history: str, turns: int) -> None:
    messages: list[Message] = [{"role": "user", "content": f"play {history}"}]
    for _ in range(turns):
        url, headers = f"{endpoint['base_url']}/chat/completions", bearer(endpoint["api_key"])
        response = await client.post(url, headers=headers, json=asked(history, messages))
        response.raise_for_status()
        messages += repeated(response.json()["choices"][0]["message"], history)


async def play_all(batch: Batch, rollouts: Sequence[str]) -> None:
    free = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, number: int, rollout: str) -> None:
        async with free:
            turns = 3 if number // len(HISTORIES) % 10 else 6
            endpoint = batch.endpoints(rollout)[POLICY]
            await play(client, endpoint, HISTORIES[number % len(HISTORIES)], turns)

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(one(client, *numbered) for numbered in enumerate(rollouts)))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RecordedRollouts:
    def play_here(batch: Batch, rollouts: Sequence[str]) -> None:
        asyncio.run(play_all(batch, rollouts))

    folder = tmp_path_factory.mktemp("played")
    return RecordedRollouts(folder, ROLLOUTS, StandIn(write), CHAT, play_here)


def of_history(table: pa.Table, history: str) -> pa.Table:
    wanted = [
        HISTORIES[int(rollout.split("-")[2]) % len(HISTORIES)] == history
        for rollout in table["rollout_id"].to_pylist()
    ]
    return table.filter(pa.array(wanted))


def test_every_merged_trajectory_is_what_was_sampled(played: RecordedRollouts) -> None:
    assert sum(map(len, played.calls.values())) == 3300
    assert differences(played.trajectories, played.calls) == []


@pytest.mark.parametrize("history", HISTORIES)
def test_turns_that_extend_keep_the_tokens_of_the_answers(
    played: RecordedRollouts, history: str
) -> None:
    kept = reuse(of_history(played.spans, history))
    assert kept.extending == 575
    assert kept.share >= 0.99, Counter(of_history(played.spans, history)["kept_how"].to_pylist())
