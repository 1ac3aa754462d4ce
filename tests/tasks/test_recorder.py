"""What the recorder of a batch keeps, and what it keeps back."""

import asyncio
import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.adapters.calls import CallId, Completion, Message, Request, Usage
from ratchet.adapters.door.batches import RolloutEnd
from ratchet.adapters.door.role_calls import SAMPLER_REFUSED
from ratchet.adapters.player_protocol import Failure
from ratchet.adapters.rewards import Reward
from ratchet.adapters.tinker.service import ServiceRefused
from ratchet.tasks.recording.journal import Journal, read_journal, read_spans, seal
from ratchet.tasks.rollouts import JournalRecorder
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.door.played_batch import BATCH, SHARD, service_without_engine, write_examples

NOW = datetime.now(UTC)


def answered(rollout: str, usage: Usage | None) -> Completion:
    call = CallId(rollout, 0, "policy" if usage is None else "helper", 0)
    said: Message = {"role": "assistant", "content": "yes"}
    request = Request("policy", [{"role": "user", "content": "?"}], [], 8, [], {})
    return Completion(call, "id", request, 1, "stop", said, "00000", NOW, NOW, usage=usage)


@pytest.mark.parametrize("by_service", [False, True])
def test_an_end_without_an_answer_of_the_service_is_recorded_once_the_service_answers_another(
    tmp_path: Path, by_service: bool
) -> None:
    """An answer of a helper, which another provider gives, says nothing about the service."""
    run, batch = RunFolder(tmp_path), ShardBatch(SHARD, 0, 2)
    shard = write_examples(run, [{"number": 0}])
    refused, other = [name for name, _ in batch.examples(shard)]
    unanswered = Failure(SAMPLER_REFUSED, "the service reads no such request")
    failure = Failure("BadRequestError", "no")
    end = RolloutEnd(failure, 0.1, refused, unanswered=unanswered)
    with Journal(run.journal(BATCH)) as journal:
        recorder = JournalRecorder(run, service_without_engine(), batch, shard, journal)
        asyncio.run(recorder.ended(end))
        usage = None if by_service else Usage(1, 1, cost=None)
        asyncio.run(recorder.answered(answered(other, usage)))
        ends = [span for span in read_journal(journal.path) if span["kind"] == "error"]
        assert len(ends) == by_service
        assert recorder.stuck != by_service
        assert isinstance(recorder.fault, ServiceRefused)
        assert "reads no such request" in str(recorder.fault)


def test_an_answer_that_was_handed_over_is_recorded_even_if_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rollouts' answers; the second one's client leaves while the first is being synced."""
    run, batch = RunFolder(tmp_path), ShardBatch(SHARD, 0, 2)
    shard = write_examples(run, [{"number": 0}])
    names = [name for name, _ in batch.examples(shard)]
    sync, syncing, may_go_on = os.fsync, threading.Event(), threading.Event()

    def wait_and_sync(file: int) -> None:
        syncing.set()
        may_go_on.wait(9)
        sync(file)

    async def leave(recorder: JournalRecorder) -> None:
        first = asyncio.create_task(recorder.answered(answered(names[0], None)))
        await asyncio.to_thread(syncing.wait, 9)
        second = asyncio.create_task(recorder.answered(answered(names[1], None)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        may_go_on.set()
        await first

    with Journal(run.journal(BATCH)) as journal:
        recorder = JournalRecorder(run, service_without_engine(), batch, shard, journal)
        monkeypatch.setattr(os, "fsync", wait_and_sync)
        asyncio.run(leave(recorder))
    assert [span["rollout_id"] for span in read_journal(journal.path)] == names


def record_ends(run: RunFolder, batch: ShardBatch, order: Sequence[str], failed: set[str]) -> None:
    """Report the ends of the rollouts that are left, all at once, in an order."""
    with Journal(run.journal(BATCH)) as journal:
        recorder = JournalRecorder(run, service_without_engine(), batch, run.shard(SHARD), journal)
        attempt, due = recorder.due()
        left = {rollout.id for rollout in due}

        async def report(name: str) -> None:
            outcome = Failure("KeyError", name) if name in failed else Reward(1.0)
            await recorder.ended(RolloutEnd(outcome, 0.1, name, attempt))

        async def report_all() -> None:
            await asyncio.gather(*(report(name) for name in order if name in left))

        asyncio.run(report_all())
        assert recorder.finished


@settings(max_examples=25)
@given(data=st.data(), groups=st.integers(1, 3), size=st.integers(1, 4))
def test_a_batch_that_was_killed_at_any_end_keeps_it_and_plays_the_others(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, groups: int, size: int
) -> None:
    run, batch = RunFolder(tmp_path_factory.mktemp("run")), ShardBatch(SHARD, 0, size)
    shard = write_examples(run, [{"number": number} for number in range(groups)])
    names = [name for name, _ in batch.examples(shard)]
    order = data.draw(st.permutations(names))
    failed = data.draw(st.sets(st.sampled_from(names)))
    record_ends(run, batch, order, failed)
    lines = run.journal(BATCH).read_bytes().splitlines(keepends=True)
    kept = data.draw(st.integers(0, len(lines)))
    run.journal(BATCH).write_bytes(b"".join(lines[:kept]))
    record_ends(run, batch, data.draw(st.permutations(names)), failed)
    again = run.journal(BATCH).read_bytes().splitlines(keepends=True)
    assert again[:kept] == lines[:kept]
    seal(run.journal(BATCH), run.spans(BATCH))
    rows = read_spans(run.spans(BATCH)).to_pylist()
    ends = [(row["rollout_id"], row["kind"]) for row in rows if row["kind"] in ("reward", "error")]
    assert sorted(ends) == sorted((n, "error" if n in failed else "reward") for n in names)
    assert {row["attempt"] for row in rows if row["rollout_id"] in order[:kept]} <= {0}
