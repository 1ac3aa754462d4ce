"""The watchdog of the event loop."""

import asyncio
import logging
import time

import pytest

from adapters.harness.loop_watchdog import watch_event_loop


async def blocking(seconds: float) -> None:
    time.sleep(seconds)


def test_a_blocking_coroutine_is_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with watch_event_loop(first_word=0.2):
            await blocking(1.5)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert "have stood still for" in caplog.text
    assert f"{__file__}, line {blocking.__code__.co_firstlineno + 1}, in blocking" in caplog.text


def test_a_running_loop_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with watch_event_loop(first_word=20.0):
            await asyncio.sleep(0.3)

    asyncio.run(work())
    assert not caplog.records
