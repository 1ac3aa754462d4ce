"""What the recorder of a batch keeps back: ends whose calls the service has refused."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from adapters.calls import CallId, Completion, Message, Request, Usage
from adapters.door.batches import RolloutEnd
from adapters.door.role_calls import SAMPLER_REFUSED
from adapters.player_protocol import Failure, PlaySettings
from adapters.tinker.service import ServiceRefused
from tasks.doors.recorder import BatchOrder, JournalRecorder
from tasks.recording.journal import Journal, read_journal
from tasks.storage.batch_plans import BatchPlan
from tasks.storage.run_folder import RunFolder
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
    run, plan = RunFolder(tmp_path), BatchPlan(SHARD, 0, 2, 1, 1.0)
    shard = write_examples(run, [{"number": 0}])
    refused, other = [name for name, _ in plan.examples(shard)]
    order = BatchOrder(plan, shard, PlaySettings("", [], 1, 1.0), judged=False)
    unanswered = Failure(SAMPLER_REFUSED, "the service reads no such request")
    failure = Failure("BadRequestError", "no")
    end = RolloutEnd(failure, 0.1, refused, unanswered=unanswered)
    with Journal(run.journal(BATCH)) as journal:
        recorder = JournalRecorder(run, service_without_engine(), order, journal)
        asyncio.run(recorder.ended(end))
        usage = None if by_service else Usage(1, 1, cost=None)
        asyncio.run(recorder.answered(answered(other, usage)))
        ends = [span for span in read_journal(journal.path) if span["kind"] == "error"]
        assert len(ends) == by_service
        state = recorder.state()
        assert state.stuck != by_service
        assert isinstance(state.fault, ServiceRefused)
        assert "reads no such request" in str(state.fault)
