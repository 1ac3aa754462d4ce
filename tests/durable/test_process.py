"""The garbage collector of a process that answers calls: it works while the process is idle."""

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from ratchet.durable.process import FEW, MANY, collect_garbage, collect_while_idle


class Circle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def without_garbage() -> Iterator[None]:
    """Begin without garbage, and with a collector that collects nothing by itself."""
    collect_garbage()
    gc.disable()
    yield
    gc.enable()


def make_garbage(count: int = FEW + 1) -> "ref[Circle]":
    garbage = [Circle() for _ in range(count)]
    return ref(garbage[0])


def test_a_process_that_is_idle_collects_its_young_garbage() -> None:
    garbage = make_garbage()
    assert garbage() is not None
    collect_while_idle()
    assert garbage() is None


def test_a_process_that_has_made_few_objects_collects_nothing() -> None:
    garbage = make_garbage(1)
    collect_while_idle()
    assert garbage() is not None


def test_garbage_that_was_alive_for_long_is_collected_after_many_times() -> None:
    kept = [Circle()]
    old = ref(kept[0])
    gc.collect(1)  # which makes it old
    kept.clear()
    for _ in range(MANY):
        make_garbage()
        collect_while_idle()
    assert old() is None
