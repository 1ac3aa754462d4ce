"""A call that was answered is answered again: nothing that was sampled is sampled twice."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.players import Here
from openai import AsyncOpenAI

from adapters.calls import Sampling
from adapters.chat import Chat
from adapters.harness.agents import load_agent
from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint
from tasks.datums import write_datums
from tasks.journal import read_journal, seal
from tasks.metrics import Metrics, measure
from tasks.recorded_calls import recorded_calls
from tasks.rollouts import Runner, plan
from tasks.spans import Span, reward_span
from tasks.storage.tables import read
from tasks.trajectories import write_trajectories
from tests.engine_server import TINY, tiny_chat_service
from tests.test_journal import NOON

BATCH = "train-00000"
SHARD: Any = [{"example_id": 3, "example": {"turns": ["one", "two", "three"]}}]
CLOCKS_AND_RESTARTS = ("seconds/", "replay/", "rollouts/retried", "calls/lost")

Collect = Callable[..., Path]


async def talks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Three turns, each with all of the conversation before it."""
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in example["turns"]:
            messages.append({"role": "user", "content": turn})
            answer = await client.chat.completions.create(model=model, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return float(len(messages[-1]["content"]))


async def talks_otherwise(example: dict[str, Any], **endpoint: str) -> float:
    """The same first turn, and another second one."""
    return await talks({"turns": ["one", "other", "three"]}, **endpoint)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with tiny_chat_service(tmp_path_factory.mktemp("state")) as service:
        yield service


@pytest.fixture(scope="module")
def collect(service: Service) -> Collect:
    """Play what a journal lacks, and seal it."""
    create = service.client.create_lora_training_client
    training = create(base_model=str(TINY), rank=2, seed=0).result()
    address = training.save_weights_for_sampler("0").result().path
    chat = Chat(service.tokenizer(address, str(TINY)))

    def collected(
        folder: Path,
        agent: Any = talks,
        version: int = 0,
        sealed: Path | None = None,
        **options: Any,
    ) -> Path:
        journal = folder / f"{BATCH}.jsonl"
        rollouts = plan(BATCH, SHARD, 2, journal)
        options = {"run": "one", "run_seed": 0, "concurrency": 2, "timeout_seconds": 30.0} | options
        player = Here(load_agent(f"{agent.__module__}:{agent.__name__}"))
        with Runner(service, lambda _: service.sampler(address), player, chat, **options) as runner:
            sampling = Sampling(max_tokens=12, temperature=1.0, top_p=1.0, top_k=-1)
            runner.collect(rollouts, journal, Checkpoint(version, address), sampling)
        return seal(journal, (sealed or folder) / f"{BATCH}.parquet")

    return collected


@pytest.fixture(scope="module")
def whole(collect: Collect, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The spans of a batch that nothing disturbed."""
    return collect(tmp_path_factory.mktemp("whole"))


def cut_after(whole: Path, folder: Path, calls: int) -> Path:
    """What a kill leaves: of each rollout the first calls, and that the next one was begun."""
    folder.mkdir(exist_ok=True)
    lines = whole.with_suffix(".jsonl").read_bytes().splitlines(keepends=True)
    spans = read_journal(whole.with_suffix(".jsonl"))
    kept = [
        line
        for line, span in zip(lines, spans, strict=True)
        if span["kind"] in ("begun", "llm") and span["call"] < calls + (span["kind"] == "begun")
    ]
    (folder / f"{BATCH}.jsonl").write_bytes(b"".join(kept))
    return folder


def rewarded(spans: Path) -> list[tuple[Any, ...]]:
    """What the attempts with a reward were made of."""
    rows = read(spans).to_pylist()
    ended = {(row["rollout_id"], row["attempt"]) for row in rows if row["kind"] == "reward"}
    columns = ("rollout_id", "kind", "call", "prompt_token_ids", "response_token_ids", "logprobs")
    columns += ("reply", "reward", "prefix_len", "prefix_call", "prefix_how")
    return [
        tuple(row[name] for name in columns)
        for row in rows
        if (row["rollout_id"], row["attempt"]) in ended and row["kind"] != "begun"
    ]


def calls(spans: Path, *, replayed: bool) -> list[Span]:
    rows = read(spans).to_pylist()
    return [row for row in rows if row["kind"] == "llm" and row["replayed"] is replayed]


def sampled_twice(spans: Path) -> int:
    """Tokens of calls that were sampled before, by the rollout, the role and the number."""
    seen: set[tuple[Any, ...]] = set()
    tokens = 0
    for row in calls(spans, replayed=False):
        key = (row["rollout_id"], row["role"], row["call"])
        tokens += len(row["response_token_ids"]) if key in seen else 0
        seen.add(key)
    return tokens


def measured(spans: Path) -> Metrics:
    trajectories = write_trajectories(spans, spans.with_name("trajectories.parquet"))
    datums = write_datums(trajectories, spans.with_name("datums.parquet"), "centred")
    return measure(spans, trajectories, datums)


def compared(metrics: Metrics) -> Metrics:
    return {k: v for k, v in metrics.items() if not k.startswith(CLOCKS_AND_RESTARTS)}


def test_a_rollout_cut_off_after_two_calls_samples_only_the_third(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    spans = collect(cut_after(whole, tmp_path / "cut", 2))
    assert [row["call"] for row in calls(spans, replayed=True)] == [0, 1] * 2
    assert [row["call"] for row in calls(spans, replayed=False)] == [0, 1, 2] * 2
    assert rewarded(spans) == rewarded(whole)
    assert sampled_twice(spans) == 0
    metrics = measured(spans)
    assert compared(metrics) == compared(measured(whole))
    assert (metrics["replay/calls"], metrics["replay/rollouts"]) == (4, 2)
    assert (metrics["replay/diverged"], metrics["calls/lost"]) == (0, 2)
    tokens = sum(len(row["response_token_ids"]) for row in calls(spans, replayed=True))
    assert metrics["replay/tokens"] == tokens > 0


def test_what_was_recorded_is_the_same_file_of_datums(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    spans = collect(cut_after(whole, tmp_path / "cut", 1))
    measured(spans)
    measured(whole)
    datums = [path.with_name("datums.parquet").read_bytes() for path in (spans, whole)]
    assert datums[0] == datums[1]


def test_without_replay_everything_is_sampled_again(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    spans = collect(cut_after(whole, tmp_path / "cut", 2), replay=False)
    assert calls(spans, replayed=True) == []
    assert sampled_twice(spans) > 0
    assert rewarded(spans) == rewarded(whole), "the seeds are the same, so the tokens are"


def test_replay_ends_at_the_first_request_that_differs(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    spans = collect(cut_after(whole, tmp_path / "cut", 3), talks_otherwise)
    assert [row["call"] for row in calls(spans, replayed=True)] == [0, 0]
    again = [row for row in calls(spans, replayed=False) if row["attempt"] == 1]
    assert [row["call"] for row in again] == [1, 2] * 2
    assert measured(spans)["replay/diverged"] == 2


def test_an_answer_of_other_weights_is_not_given_again(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    spans = collect(cut_after(whole, tmp_path / "cut", 2), version=1)
    assert calls(spans, replayed=True) == []


def test_a_rollout_cut_off_while_it_was_replayed_loses_nothing(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    first = collect(cut_after(whole, tmp_path / "first", 2)).with_suffix(".jsonl")
    spans, lines = read_journal(first), first.read_bytes().splitlines(keepends=True)
    kept = [
        line
        for line, span in zip(lines, spans, strict=True)
        if span["attempt"] == 0 or (span["kind"], span.get("call")) == ("llm", 0)
    ]
    second = tmp_path / "second"
    second.mkdir()
    (second / first.name).write_bytes(b"".join(kept))
    again = collect(second)
    assert [(row["attempt"], row["call"]) for row in calls(again, replayed=True)] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ] * 2
    assert rewarded(again) == rewarded(whole)
    assert sampled_twice(again) == 0


def test_a_finished_rollout_is_not_played_again(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    folder = cut_after(whole, tmp_path / "cut", 2)
    journal = folder / f"{BATCH}.jsonl"
    end = whole.with_suffix(".jsonl").read_bytes().splitlines(keepends=True)
    rows = zip(end, read_journal(whole.with_suffix(".jsonl")), strict=True)
    finished = f"{BATCH}-0000-01"
    lines = [line for line, span in rows if span["rollout_id"] == finished]
    others = [
        line
        for line, span in zip(
            journal.read_bytes().splitlines(keepends=True), read_journal(journal), strict=True
        )
        if span["rollout_id"] != finished
    ]
    journal.write_bytes(b"".join(others + lines))
    rows = read(collect(folder)).to_pylist()
    assert {row["attempt"] for row in rows if row["rollout_id"] == finished} == {0}
    assert {row["attempt"] for row in rows if row["rollout_id"] != finished} == {0, 1}


def test_an_answer_that_was_lost_does_not_end_replay(
    collect: Collect, whole: Path, tmp_path: Path
) -> None:
    folder = cut_after(whole, tmp_path / "cut", 3)
    journal = folder / f"{BATCH}.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    spans = read_journal(journal)
    kept = [
        x
        for x, span in zip(lines, spans, strict=True)
        if (span["kind"], span["call"]) != ("llm", 1)
    ]
    journal.write_bytes(b"".join(kept))
    spans = collect(folder)
    assert [row["call"] for row in calls(spans, replayed=True)] == [0, 2] * 2
    assert rewarded(spans) == rewarded(whole)
    assert sampled_twice(spans) == 0


def test_a_rollout_that_failed_begins_anew(whole: Path) -> None:
    spans = read_journal(whole.with_suffix(".jsonl"))
    first = [span for span in spans if span["rollout_id"].endswith("-00")]
    failed = reward_span(first[0]["rollout_id"], 0, 1.0, NOON, NOON) | {"kind": "error"}
    assert [call.place.call for call in recorded_calls(first)[first[0]["rollout_id"]]] == [0, 1, 2]
    assert recorded_calls([*first, failed]) == {}


def test_a_call_that_was_asked_otherwise_hides_what_followed_it_before(whole: Path) -> None:
    spans = [
        span
        for span in read_journal(whole.with_suffix(".jsonl"))
        if span["kind"] == "llm" and span["rollout_id"].endswith("-00")
    ]
    otherwise = spans[1] | {"attempt": 1, "request_sha": "another"}
    (recorded,) = recorded_calls([*spans, otherwise]).values()
    assert [(call.place.attempt, call.place.call) for call in recorded] == [(0, 0), (1, 1)]
