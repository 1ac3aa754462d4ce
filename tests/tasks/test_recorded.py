"""A call that was answered is answered again: nothing that was sampled is sampled twice."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from ratchet.adapters.calls import POLICY, Policy, Sampling
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import Failure, PlaySettings
from ratchet.tasks.metrics import StepFiles, measure_step
from ratchet.tasks.recording.journal import Journal, read_journal
from ratchet.tasks.recording.recorded_rollouts import recorded_calls
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.recording.step_log import Metrics
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, write_datums
from tests.support.door.played_batch import BATCH, PAIRS, SHARD, Stage, write_examples
from tests.tasks.test_journal import ended

EXAMPLE = {"turns": ["one", "two", "three"]}
SAMPLING = Sampling(max_tokens=12, temperature=1.0, top_p=1.0, top_k=-1)
CLOCKS_AND_RESTARTS = ("seconds/", "spent/", "recall/", "rollouts/retried", "calls/lost")

Collect = Callable[..., RunFolder]


async def talks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Play three turns, each with all of the conversation before it."""
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in example["turns"]:
            messages.append({"role": "user", "content": turn})
            answer = await client.chat.completions.create(model=model, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return float(len(messages[-1]["content"]))


async def talks_otherwise(example: dict[str, Any], **endpoint: str) -> float:
    """Play the same first turn, and another second one."""
    return await talks({"turns": ["one", "other", "three"]}, **endpoint)


async def talks_between_refusals(example: dict[str, Any], **endpoint: str) -> float:
    """Play `talks`, after a call with a field that is refused and one whose prompt is too long."""
    client = AsyncOpenAI(base_url=endpoint["base_url"], api_key=endpoint["api_key"])
    refused: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 9},
        {"messages": [{"role": "user", "content": "a cat " * 1200}]},
    ]
    async with client:
        for fields in refused:
            with pytest.raises(BadRequestError):
                await client.chat.completions.create(model=endpoint["model"], **fields)
    return await talks(example, **endpoint)


@pytest.fixture(scope="module")
def collect(stage: Stage) -> Collect:
    """Return a function that plays what a run's journal lacks, and seals it."""

    def collected(folder: Path, agent: Any = talks, version: str = "00000") -> RunFolder:
        run = RunFolder(folder)
        shard = write_examples(run, [EXAMPLE])
        sampled_by = SampledBy({POLICY: Policy(stage.sampler, version)}, SAMPLING)
        settings = PlaySettings(f"{agent.__module__}:{agent.__name__}", [POLICY], 2, 30.0)
        with Door(stage.chat, {}, run_seed=0) as door:
            server = RolloutHost(run, door, stage.service, settings)
            collect_rollouts.make(
                run.spans(BATCH), shard, PAIRS, server, lambda: sampled_by, play_batch
            )
        return run

    return collected


@pytest.fixture(scope="module")
def whole(collect: Collect, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Play a batch that nothing disturbs."""
    return collect(tmp_path_factory.mktemp("whole"))


def journalled(run: RunFolder) -> list[Span]:
    return read_journal(run.journal(BATCH))


def written(folder: Path, spans: Sequence[Span]) -> Path:
    """Write a journal of these spans; return the run's folder."""
    with Journal(RunFolder(folder).journal(BATCH)) as journal:
        for span in spans:
            journal.append(span)
    return folder


def cut_after(whole: RunFolder, calls: int) -> list[Span]:
    """Return what a kill leaves: the first calls of each rollout, and that the next was begun."""
    return [
        span
        for span in journalled(whole)
        if span["kind"] in ("begun", "llm") and span["call"] < calls + (span["kind"] == "begun")
    ]


def rewarded(run: RunFolder) -> list[tuple[Any, ...]]:
    """Return what the attempts with a reward consist of."""
    rows = read_table(run.spans(BATCH)).to_pylist()
    ended = {(row["rollout_id"], row["attempt"]) for row in rows if row["kind"] == "reward"}
    columns = ("rollout_id", "kind", "call", "prompt_token_ids", "response_token_ids", "logprobs")
    columns += ("reply", "reward", "kept_tokens", "kept_call", "kept_how")
    return [
        tuple(row[name] for name in columns)
        for row in rows
        if (row["rollout_id"], row["attempt"]) in ended and row["kind"] != "begun"
    ]


def calls(run: RunFolder, *, recalled: bool) -> list[Span]:
    rows = read_table(run.spans(BATCH)).to_pylist()
    return [row for row in rows if row["kind"] == "llm" and row["recalled"] is recalled]


def sampled_twice(run: RunFolder) -> int:
    """Count the tokens of calls that were sampled before, by rollout, role and number."""
    seen: set[tuple[Any, ...]] = set()
    tokens = 0
    for row in calls(run, recalled=False):
        key = (row["rollout_id"], row["role"], row["call"])
        tokens += len(row["response_token_ids"]) if key in seen else 0
        seen.add(key)
    return tokens


def measured(run: RunFolder) -> Metrics:
    spans, trajectories, datums = [run.spans(BATCH)], *made_of(run)
    assemble_trajectories.make(trajectories, spans)
    write_datums(datums, trajectories, credited("centred"))
    return measure_step(StepFiles(spans, trajectories, {}, datums))


def made_of(run: RunFolder) -> tuple[Path, Path]:
    """Return the paths of the trajectories and of the datums."""
    return run.trajectories(POLICY, 0), run.datums(POLICY, 0)


def compared(metrics: Metrics) -> Metrics:
    return {k: v for k, v in metrics.items() if not k.startswith(CLOCKS_AND_RESTARTS)}


def test_a_rollout_cut_off_after_two_calls_samples_only_the_third(
    collect: Collect, whole: RunFolder, tmp_path: Path
) -> None:
    run = collect(written(tmp_path, cut_after(whole, 2)))
    assert [row["call"] for row in calls(run, recalled=True)] == [0, 1] * 2
    assert [row["call"] for row in calls(run, recalled=False)] == [0, 1, 2] * 2
    assert rewarded(run) == rewarded(whole)
    assert sampled_twice(run) == 0
    metrics = measured(run)
    assert compared(metrics) == compared(measured(whole))
    datums = [each.datums(POLICY, 0).read_bytes() for each in (run, whole)]
    assert datums[0] == datums[1]
    assert (metrics["recall/calls"], metrics["recall/rollouts"]) == (4, 2)
    assert (metrics["recall/diverged"], metrics["calls/lost"]) == (0, 2)
    tokens = sum(len(row["response_token_ids"]) for row in calls(run, recalled=True))
    assert metrics["recall/tokens"] == tokens > 0


def test_refused_calls_are_rows_and_change_nothing_that_is_recalled_or_trained(
    collect: Collect, tmp_path: Path
) -> None:
    whole = collect(tmp_path / "whole", talks_between_refusals)
    rows = read_table(whole.spans(BATCH)).to_pylist()
    refused = [row for row in rows if row["kind"] == "refused"]
    assert [(row["call"], row["error_type"]) for row in refused] == [
        (0, "refused"),
        (1, "context_length_exceeded"),
    ] * 2
    assert "context length is 2048 tokens, and the messages have 24" in refused[1]["error_message"]
    # What is too long has a number, since a retry of it might be answered; so calls begin at 1.
    assert [row["call"] for row in calls(whole, recalled=False)] == [1, 2, 3] * 2
    kept = [span for span in journalled(whole) if span["kind"] == "refused"] + cut_after(whole, 3)
    run = collect(written(tmp_path / "cut", kept), talks_between_refusals)
    assert [row["call"] for row in calls(run, recalled=True)] == [1, 2] * 2
    assert (sampled_twice(run), rewarded(run)) == (0, rewarded(whole))
    assert compared(measured(run)) == compared(measured(whole))
    datums = [each.datums(POLICY, 0).read_bytes() for each in (run, whole)]
    assert datums[0] == datums[1]


def test_recall_ends_at_the_first_request_that_differs(
    collect: Collect, whole: RunFolder, tmp_path: Path
) -> None:
    run = collect(written(tmp_path, cut_after(whole, 3)), talks_otherwise)
    assert [row["call"] for row in calls(run, recalled=True)] == [0, 0]
    again = [row for row in calls(run, recalled=False) if row["attempt"] == 1]
    assert [row["call"] for row in again] == [1, 2] * 2
    assert measured(run)["recall/diverged"] == 2


def test_an_answer_of_other_weights_is_not_given_again(
    collect: Collect, whole: RunFolder, tmp_path: Path
) -> None:
    run = collect(written(tmp_path, cut_after(whole, 2)), version="00001")
    assert calls(run, recalled=True) == []


def test_a_rollout_cut_off_while_it_was_recalled_loses_nothing(
    collect: Collect, whole: RunFolder, tmp_path: Path
) -> None:
    first = collect(written(tmp_path / "first", cut_after(whole, 2)))
    kept = [
        span
        for span in journalled(first)
        if span["attempt"] == 0 or (span["kind"], span.get("call")) == ("llm", 0)
    ]
    again = collect(written(tmp_path / "second", kept))
    assert [(row["attempt"], row["call"]) for row in calls(again, recalled=True)] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ] * 2
    assert rewarded(again) == rewarded(whole)
    assert sampled_twice(again) == 0


def test_a_finished_rollout_is_not_played_again(
    collect: Collect, whole: RunFolder, tmp_path: Path
) -> None:
    finished = f"{SHARD}-0000-01"
    ended = [span for span in journalled(whole) if span["rollout_id"] == finished]
    others = [span for span in cut_after(whole, 2) if span["rollout_id"] != finished]
    run = collect(written(tmp_path, others + ended))
    rows = read_table(run.spans(BATCH)).to_pylist()
    assert {row["attempt"] for row in rows if row["rollout_id"] == finished} == {0}
    assert {row["attempt"] for row in rows if row["rollout_id"] != finished} == {0, 1}


def test_an_answer_that_was_lost_does_not_end_recall(
    collect: Collect, whole: RunFolder, tmp_path: Path
) -> None:
    kept = [span for span in cut_after(whole, 3) if (span["kind"], span["call"]) != ("llm", 1)]
    run = collect(written(tmp_path, kept))
    assert [row["call"] for row in calls(run, recalled=True)] == [0, 2] * 2
    assert rewarded(run) == rewarded(whole)
    assert sampled_twice(run) == 0


def test_a_rollout_that_failed_begins_anew(whole: RunFolder) -> None:
    spans = read_journal(whole.journal(BATCH))
    first = [span for span in spans if span["rollout_id"].endswith("-00")]
    failed = ended(first[0]["rollout_id"], Failure("KeyError", "'name'"))
    assert [call.id.number for call in recorded_calls(first)[first[0]["rollout_id"]]] == [0, 1, 2]
    assert recorded_calls([*first, failed]) == {}


def test_a_call_that_was_asked_otherwise_hides_what_followed_it_before(whole: RunFolder) -> None:
    spans = [
        span
        for span in read_journal(whole.journal(BATCH))
        if span["kind"] == "llm" and span["rollout_id"].endswith("-00")
    ]
    otherwise = spans[1] | {"attempt": 1, "request_sha": "another"}
    (recorded,) = recorded_calls([*spans, otherwise]).values()
    assert [(call.id.attempt, call.id.number) for call in recorded] == [(0, 0), (1, 1)]
