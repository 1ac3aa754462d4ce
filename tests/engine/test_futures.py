"""Futures: requests are submitted once, answered repeatedly, and dropped in the end."""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable

import pytest
from fastapi import Response

from ratchet.engine.errors import Gone, RequestRefused
from ratchet.engine.futures import Futures, json_answer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def answering(content: dict[str, object]) -> Callable[[], Awaitable[Response]]:
    async def work() -> Response:
        return json_answer(content)

    return work


def failing(error: Exception) -> Callable[[], Awaitable[Response]]:
    async def work() -> Response:
        raise error

    return work


async def content(futures: Futures, request_id: str) -> dict[str, object]:
    answer = await futures.answer(request_id, seconds=60)
    assert answer is not None
    return json.loads(bytes(answer.body))


async def test_answer_can_be_fetched_more_than_once() -> None:
    futures = Futures()
    request_id = futures.submit(answering({"n": 1}))
    assert await content(futures, request_id) == {"n": 1}
    assert await content(futures, request_id) == {"n": 1}


async def test_an_answer_that_is_kept_is_nothing_for_the_garbage_collector_to_look_through() -> (
    None
):
    futures = Futures()
    await content(futures, futures.submit(answering({"n": 0})))
    gc.collect()
    before = len(gc.get_objects())
    for number in range(200):
        await content(futures, futures.submit(answering({"n": number})))
    gc.collect()
    assert len(gc.get_objects()) < before + 100


async def test_poll_returns_none_after_its_timeout() -> None:
    futures = Futures()
    never = asyncio.Event()

    async def work() -> Response:
        await never.wait()
        return json_answer({})

    request_id = futures.submit(work)
    assert await futures.answer(request_id, seconds=0.01) is None
    never.set()
    assert await content(futures, request_id) == {}


async def test_failures_name_the_user_or_the_server(caplog: pytest.LogCaptureFixture) -> None:
    futures = Futures()
    mistake = futures.submit(failing(RequestRefused("rank must be 1 or more")))
    fault = futures.submit(failing(RuntimeError("out of memory")))
    assert await content(futures, mistake) == {
        "error": "rank must be 1 or more",
        "category": "user",
    }
    assert await content(futures, fault) == {
        "error": "RuntimeError: out of memory",
        "category": "server",
    }
    assert [bool(r.exc_info) for r in caplog.records if r.name.startswith("ratchet.engine")] == [
        True
    ]


async def test_finished_requests_and_their_keys_are_dropped_after_a_while() -> None:
    now = [0.0]
    futures = Futures(keep_seconds=600, clock=lambda: now[0])
    old = futures.submit(answering({}), key="old")
    await content(futures, old)
    now[0] = 599.0
    young = futures.submit(answering({}), key="young")
    await content(futures, young)
    assert len(futures) == 2
    now[0] = 601.0
    futures.submit(answering({}))
    assert not futures.knows("old")
    assert futures.knows("young")
    with pytest.raises(Gone):
        await futures.answer(old)


async def test_oldest_answers_are_dropped_when_all_are_too_large() -> None:
    futures = Futures(keep_bytes=100)
    ids = [futures.submit(answering({"text": "x" * 30})) for _ in range(5)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(futures) == 2  # 43 bytes each
    assert await content(futures, ids[-1]) == {"text": "x" * 30}


async def test_close_ends_every_poll() -> None:
    futures = Futures()

    async def work() -> Response:
        await asyncio.Event().wait()
        return json_answer({})

    poll = asyncio.create_task(futures.answer(futures.submit(work), seconds=60))
    await asyncio.sleep(0)
    futures.close()
    assert await asyncio.wait_for(poll, 60) is None
