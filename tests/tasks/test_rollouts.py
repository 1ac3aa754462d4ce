"""A rollout ends as a row: with its reward, or with the error that it failed with."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.storage.names import ShardBatch
from tests.support.door.played_batch import BATCH, SHARD, Spans, Stage, ends
from tests.support.servers.engine_server import TINY

EXAMPLES = ({"name": "a"}, {"name": "b"})
together = threading.Barrier(2)


async def asks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": example["name"]}]
        )
    return 1.0 if example["name"] == "a" else -1.0


def asks_plainly(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    together.wait(60)  # passes only if two plain functions run at the same time
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": example["name"]}]
        )
    return 0.5


async def asks_at_length(example: dict[str, Any], **where: str) -> float:
    await asks({"name": "a cat " * 2200}, **where)
    return 1.0


async def raises(example: dict[str, Any], **_: str) -> float:
    raise KeyError(example["name"])


@pytest.fixture
def collect(stage: Stage, tmp_path: Path) -> Any:
    def collected(agent: Any, group_size: int = 2) -> Spans:
        batch = ShardBatch(SHARD, 0, group_size)
        return stage.play(tmp_path, agent, EXAMPLES, batch, timeout_seconds=60.0)

    return collected


def test_a_prompt_beyond_what_the_model_has_read_is_answered(stage: Stage, tmp_path: Path) -> None:
    tokenizer = stage.service.tokenizer_of(stage.sampler)
    served = Chat(tokenizer, context=stage.service.context(str(TINY)))
    spans = replace(stage, chat=served).play(tmp_path, asks_at_length)
    calls = [span for span in spans if span["kind"] == "llm"]
    (prompt,) = {span["gen_ai_usage_input_tokens"] for span in calls}
    assert (len(calls), prompt > 4300) == (2, True)
    assert [end["reward"] for end in ends(spans)] == [1.0, 1.0]


def test_each_rollout_leaves_its_calls_and_its_reward(collect: Any) -> None:
    spans = collect(asks)
    assert [(end["rollout_id"], end["reward"]) for end in ends(spans)] == [
        ("train-00000-0000-00", 1.0),
        ("train-00000-0000-01", 1.0),
        ("train-00000-0001-00", -1.0),
        ("train-00000-0001-01", -1.0),
    ]
    calls = [span for span in spans if span["kind"] == "llm"]
    assert len(calls) == 4
    assert {call["policy_version"] for call in calls} == {"00000"}
    assert ends(spans)[2]["attributes"] == {"example_id": 1, "example": {"name": "b"}}


def test_siblings_of_a_group_sample_differently(collect: Any) -> None:
    calls = [span for span in collect(asks, group_size=6) if span["kind"] == "llm"]
    answers = {
        tuple(call["response_token_ids"]) for call in calls if call["group_id"].endswith("-0000")
    }
    assert len(answers) > 1


def test_plain_functions_run_side_by_side(collect: Any) -> None:
    assert [end["reward"] for end in ends(collect(asks_plainly, group_size=1))] == [0.5, 0.5]


def test_a_batch_that_has_ended_is_not_opened_again(collect: Any, tmp_path: Path) -> None:
    collect(asks, group_size=1)
    before = (tmp_path / "journal" / f"{BATCH}.jsonl").read_bytes()
    (tmp_path / "spans" / f"{BATCH}.parquet").unlink()
    collect(raises, group_size=1)
    assert (tmp_path / "journal" / f"{BATCH}.jsonl").read_bytes() == before
