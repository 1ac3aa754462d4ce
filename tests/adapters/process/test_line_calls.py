"""Two processes call each other by lines, and what one raises is raised in the other."""

import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from adapters.errors import EngineDied, PassingError
from adapters.process.child import ChildProcess
from adapters.process.line_calls import LineCalls

PROGRAM = """
import os
from adapters.errors import EngineDied
from adapters.process.line_calls import LineCalls, take_streams

def answer(name, given):
    print("a library says so")
    if name == "add":
        return sum(given)
    if name == "ask back":
        return calls.ask("double", given).result() + 1
    if name == "die":
        os._exit(7)
    if name == "open":
        open(given)
    if name == "engine":
        raise EngineDied("the engine ended")
    raise KeyError(name)

lines, tell = take_streams()
calls = LineCalls(tell, answer)
calls.listen(lines, AssertionError)
"""


@pytest.fixture
def calls() -> Iterator[LineCalls]:
    child = ChildProcess([sys.executable, "-c", PROGRAM])

    def double(name: str, given: Any) -> int:
        assert name == "double"
        return 2 * given

    calls = LineCalls(child.tell, double)
    ended = PassingError("the program ended")
    reader = Thread(target=calls.listen, args=(child.lines(), lambda: ended))
    reader.start()
    yield calls
    child.end(30)
    reader.join()


def test_calls_are_answered_in_any_order_and_while_the_other_process_asks_back(
    calls: LineCalls,
) -> None:
    asked = [calls.ask("ask back", number) for number in range(20)]
    assert calls.ask("add", [1, 2]).result() == 3
    assert [one.result() for one in asked] == [2 * number + 1 for number in range(20)]


def test_an_error_keeps_its_class_and_a_defect_says_what_it_was(calls: LineCalls) -> None:
    with pytest.raises(EngineDied, match="the engine ended"):
        calls.ask("engine").result()
    with pytest.raises(FileNotFoundError):
        calls.ask("open", "/no/such/file").result()
    with pytest.raises(RuntimeError, match="KeyError: 'unknown'"):
        calls.ask("unknown").result()


def test_the_end_of_the_other_process_ends_every_call_to_it(calls: LineCalls) -> None:
    with pytest.raises(PassingError, match="the program ended"):
        calls.ask("die").result()
    with pytest.raises(PassingError, match="the program ended"):
        calls.ask("add", [1]).result()
