"""Waits, their log and their limits, and the errors of the Tinker service."""

import asyncio
import logging
import sys
import traceback
from concurrent.futures import Future
from contextlib import suppress
from threading import Timer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
from tinker.types import RequestErrorCategory

from ratchet.adapters.errors import EngineDied, PassingError, UserError
from ratchet.adapters.process.clock import Wait
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import (
    PatientSampler,
    Service,
    ServiceBroken,
    ServiceFailed,
    ServiceRefused,
    TimedOut,
    open_session,
    translate_error,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    stopped = SimpleNamespace(seconds=lambda: now[0])
    for module in ("ratchet.adapters.process.clock", "ratchet.adapters.tinker.service"):
        monkeypatch.setattr(f"{module}.running_clock", lambda: stopped)
    return now


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return our log messages; the SDK's threads may still log an engine of another test."""
    return [
        record.message for record in caplog.records if record.name.startswith("ratchet.adapters")
    ]


def logged_seconds(wait: Wait, clock: list[float], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the seconds of the first five minutes at which the wait is logged."""
    said = []
    for second in range(300):
        clock[0] = second
        wait.speak()
        said += [second] * len(messages(caplog))
        caplog.clear()
    return said


def test_a_wait_is_one_warning_after_20_seconds_and_then_a_line_at_doubled_intervals(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    assert logged_seconds(Wait("an answer", None), clock, caplog) == [20]
    with caplog.at_level(logging.INFO, logger="ratchet.adapters"):
        clock[0] = 0.0
        assert logged_seconds(Wait("an answer", None), clock, caplog) == [20, 40, 80, 160]


def test_the_log_names_the_wait_its_duration_and_its_limit(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    wait = Wait("forward_backward of step 3", 600)
    clock[0] = 30.0
    wait.speak()
    said = "waiting for forward_backward of step 3 for 30 s; it is given up after 600 s"
    assert messages(caplog) == [said]
    assert (wait.over, wait.until_next()) == (False, 30.0)
    clock[0] = 600.0
    assert wait.over


@pytest.fixture
def service() -> Service:
    nobody: Any = None
    return Service(nobody, TinkerServer(None, None, Future(), None), patience=0.2)


def test_a_request_to_a_silent_service_times_out_and_is_cancelled(service: Service) -> None:
    silent: Future[None] = Future()
    asked: Any = SimpleNamespace(future=lambda: silent)
    with pytest.raises(TimedOut, match=r"within 0 s \(waited for an answer\)") as raised:
        service.result(asked, "an answer")
    assert isinstance(raised.value, PassingError)
    assert silent.cancelled()


def test_a_dead_engine_raises_before_the_timeout(service: Service) -> None:
    service.died.set_exception(EngineDied("it ended"))
    asked: Any = SimpleNamespace(future=Future)
    with pytest.raises(EngineDied):
        service.result(asked, "an answer")


def test_the_death_of_an_engine_has_a_short_stack_trace_however_often_it_is_raised(
    service: Service,
) -> None:
    service.died.set_exception(EngineDied("it ended"))
    for _ in range(100):
        with suppress(EngineDied):
            service.check()
    with pytest.raises(EngineDied, match="it ended") as raised:
        service.check()
    assert len(traceback.format_exception(raised.value)) < 10


@pytest.mark.parametrize("error", [OSError("the disk is gone"), ServiceRefused("no")])
def test_an_error_of_a_call_is_raised_where_its_result_is_awaited(
    service: Service, error: Exception
) -> None:
    def fail() -> None:
        raise error

    service.patience = 60
    with pytest.raises(type(error), match=str(error)):
        service.call("the tokenizer", fail)


def test_nobody_waits_for_a_call_whose_thread_was_ended(service: Service) -> None:
    service.patience = 3600
    with pytest.raises(ServiceFailed, match="asked the Tinker service for the tokenizer was ended"):
        service.call("the tokenizer", sys.exit)


def test_an_engine_that_dies_before_the_session_is_open_ends_the_wait() -> None:
    closed = TinkerServer("http://127.0.0.1:9", "tml-none", Future(), None)
    with open_session(closed, patience=60) as service:
        Timer(0.2, service.died.set_exception, [EngineDied("it ended")]).start()
        with pytest.raises(EngineDied):
            service.sampler("tinker://nobody/weights/0")


def test_cancelled_work_has_ended_before_the_engine_s_death_is_raised(service: Service) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            service.died.set_exception(EngineDied("it ended"))
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("work")

    async def work_while_alive() -> None:
        try:
            await service.while_alive(work(), "the rollouts of train-00003")
        finally:
            ended.append("the wait")

    with pytest.raises(EngineDied):
        asyncio.run(work_while_alive())
    assert ended == ["work", "the wait"]


def test_a_silent_sampler_raises_a_timeout_error(service: Service) -> None:
    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    client: Any = SimpleNamespace(sample=forever)
    params = tinker.SamplingParams(max_tokens=1)
    with pytest.raises(TimeoutError, match="no answer within"):
        asyncio.run(PatientSampler(client, service).sample(tinker.ModelInput.empty(), 1, params))
    assert service.sampling == {}


def test_sampling_ends_when_the_engine_dies(service: Service) -> None:
    async def die(*_: object) -> None:
        service.died.set_exception(EngineDied("it ended"))
        await asyncio.Event().wait()

    client: Any = SimpleNamespace(sample=die)
    service.patience = 60
    patient = PatientSampler(client, service)
    with pytest.raises(EngineDied):
        asyncio.run(patient.sample(tinker.ModelInput.empty(), 1, tinker.SamplingParams()))
    assert service.sampling == {}


def test_rollouts_that_wait_for_the_service_are_one_line_of_the_log(
    service: Service, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    clock[0] = 100.0
    for seconds in (5.0, 31.0):
        service.sampling[object()] = clock[0] - seconds

    async def wait_together() -> None:
        batches = (f"the rollouts of train-00003.{number}" for number in range(4))
        waits = (service.while_alive(asyncio.sleep(1.2), batch) for batch in batches)
        await asyncio.gather(*waits)

    asyncio.run(wait_together())
    assert messages(caplog) == [
        "waiting for 2 answers of the Tinker service, for the first for 31 s"
    ]


def test_rollouts_that_wait_for_nothing_of_the_service_are_named(
    service: Service, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        clock[0] = 31.0
        await asyncio.sleep(0.6)

    asyncio.run(service.while_alive(work(), "the rollouts of train-00003"))
    said = "waiting for the rollouts of train-00003 for 31 s, and no sampling call is under way"
    assert messages(caplog) == [said]


def failed(category: RequestErrorCategory) -> tinker.RequestFailedError:
    text = "Request failed: no such loss for self.request_id='1' and expected type …"
    return tinker.RequestFailedError(text, "1", category)


def test_a_failed_request_is_translated_by_its_category() -> None:
    blamed = translate_error(failed(RequestErrorCategory.User), "optim_step of step 1")
    assert isinstance(blamed, ServiceRefused)
    assert str(blamed) == "the Tinker service refuses optim_step of step 1: no such loss"
    for category in (RequestErrorCategory.Server, RequestErrorCategory.Unknown):
        assert isinstance(translate_error(failed(category), "it"), ServiceFailed)


def test_an_error_of_the_sdk_is_translated_by_its_cause() -> None:
    poisoned = RuntimeError("A previous request failed")
    poisoned.__cause__ = failed(RequestErrorCategory.User)
    assert isinstance(translate_error(poisoned, "it"), ServiceRefused)
    assert isinstance(translate_error(ValueError("no number"), "it"), ServiceBroken)
    ours = UserError("no loss of the project")
    assert translate_error(ours, "it") is ours


def test_a_key_that_a_service_does_not_know_is_a_sentence_with_what_to_do() -> None:
    answer = httpx.Response(401, request=httpx.Request("POST", "http://127.0.0.1/api"))
    unknown = tinker.AuthenticationError("no", response=answer, body={"detail": "Invalid API key"})
    said = translate_error(unknown, "a new session")
    assert isinstance(said, ServiceRefused)
    assert f"{said}" == (
        "the Tinker service refuses a new session: Invalid API key (401); set TINKER_API_KEY to a "
        "key of this service, or unset it to run on the engine here"
    )
    expired = translate_error(tinker.TinkerError("The key has expired."), "a new session")
    assert f"{expired}" == "the Tinker service refuses a new session: The key has expired."
