"""The watchdog of the event loop."""

import asyncio
import logging
import time

import pytest

from adapters.process.event_loop import watch_event_loop


async def blocking(records: list[logging.LogRecord]) -> None:
    while not records:
        time.sleep(0.05)


def test_a_blocking_coroutine_is_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with watch_event_loop(first_word=0.2):
            await blocking(caplog.records)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert "have stood still for" in caplog.text
    lines = [blocking.__code__.co_firstlineno + 1, blocking.__code__.co_firstlineno + 2]
    assert any(f"{__file__}, line {line}, in blocking" in caplog.text for line in lines)


def test_a_running_loop_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with watch_event_loop(first_word=20.0):
            await asyncio.sleep(0.3)

    asyncio.run(work())
    assert not [record for record in caplog.records if record.name.endswith("event_loop")]
