"""A rollout ends as a row: with its reward, or with the error that it failed with."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.players import Here
from openai import AsyncOpenAI, OpenAI

from adapters.calls import Sampler, Sampling
from adapters.chat import Chat
from adapters.harness.agents import load_agent
from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint
from tasks.journal import read_journal
from tasks.rollouts import Runner, plan
from tests.engine_server import TINY, tiny_chat_service

SAMPLING = Sampling(max_tokens=8, temperature=1.0, top_p=1.0, top_k=-1)
SHARD: Any = [
    {"example_id": 7, "example": {"name": "a"}},
    {"example_id": 9, "example": {"name": "b"}},
]
together = threading.Barrier(2)


async def asks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": example["name"]}]
        )
    return 1.0 if example["name"] == "a" else -1.0


def asks_plainly(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    together.wait(10)  # passes only if two plain functions run at the same time
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": example["name"]}]
        )
    return 0.5


async def raises(example: dict[str, Any], **_: str) -> float:
    raise KeyError(example["name"])


async def hangs(example: dict[str, Any], **_: str) -> float:
    await asyncio.sleep(60)
    return 1.0


async def returns_nan(example: dict[str, Any], **_: str) -> float:
    return float("nan")


async def returns_text(example: dict[str, Any], **_: str) -> Any:
    return "good"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with tiny_chat_service(tmp_path_factory.mktemp("state")) as service:
        yield service


@pytest.fixture(scope="module")
def checkpoint(service: Service) -> Checkpoint:
    create = service.client.create_lora_training_client
    training = create(base_model=str(TINY), rank=2, seed=0).result()
    return Checkpoint(0, training.save_weights_for_sampler("0").result().path)


@pytest.fixture
def collect(service: Service, checkpoint: Checkpoint, tmp_path: Path) -> Any:
    def sampler(of: Checkpoint) -> Sampler:
        return service.sampler(of.sampler)

    def collected(agent: Any, group_size: int = 2) -> list[dict[str, Any]]:
        journal = tmp_path / "train-00000.jsonl"
        rollouts = plan("train-00000", SHARD, group_size, journal)
        chat = Chat(service.tokenizer(checkpoint.sampler, str(TINY)))
        play = load_agent(f"{agent.__module__}:{agent.__name__}")
        seconds = 1.0 if agent is hangs else 60.0
        options: Any = {"run": "one", "run_seed": 0, "concurrency": 4, "timeout_seconds": seconds}
        with Runner(service, sampler, Here(play), chat, **options) as runner:
            runner.collect(rollouts, journal, checkpoint, SAMPLING)
        return read_journal(journal)

    return collected


def ends(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(
        (span for span in spans if span["kind"] in ("reward", "error")),
        key=lambda span: span["rollout_id"],
    )


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
    assert ends(spans)[2]["attributes"] == {"example_id": 9, "example": {"name": "b"}}


def test_siblings_of_a_group_sample_differently(collect: Any) -> None:
    calls = [span for span in collect(asks, group_size=6) if span["kind"] == "llm"]
    answers = {
        tuple(call["response_token_ids"]) for call in calls if call["group_id"].endswith("-0000")
    }
    assert len(answers) > 1


def test_plain_functions_run_side_by_side(collect: Any) -> None:
    assert [end["reward"] for end in ends(collect(asks_plainly, group_size=1))] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        (raises, "KeyError"),
        (hangs, "TimeoutError"),
        (returns_nan, "RewardError"),
        (returns_text, "RewardError"),
    ],
)
def test_a_failed_rollout_is_a_row_with_its_error_and_no_reward(
    collect: Any, agent: Any, error: str
) -> None:
    rows = ends(collect(agent, group_size=1))
    assert [(row["kind"], row["error_type"], row.get("reward")) for row in rows] == [
        ("error", error, None)
    ] * 2


def test_rollouts_that_have_ended_are_not_planned_again(collect: Any, tmp_path: Path) -> None:
    collect(asks, group_size=1)
    planned = plan("train-00000", SHARD, 2, tmp_path / "train-00000.jsonl")
    assert [rollout.id for rollout in planned] == ["train-00000-0000-01", "train-00000-0001-01"]


def test_a_rollout_that_was_cut_off_is_planned_as_the_next_attempt(
    collect: Any, tmp_path: Path
) -> None:
    collect(asks, group_size=1)
    journal = tmp_path / "train-00000.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"kind":"reward"' not in line))
    assert [rollout.attempt for rollout in plan("train-00000", SHARD, 1, journal)] == [1, 1]
