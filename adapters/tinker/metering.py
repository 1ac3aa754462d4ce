"""Meters of what a service computes for a run beside the calls of agents: training and scoring."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

_task: ContextVar[str] = ContextVar("task", default="")


@contextmanager
def working_on(task: str) -> Iterator[None]:
    """Have what this block asks of a service counted for a task, such as `updates/00003`."""
    before = _task.set(task)
    try:
        yield
    finally:
        _task.reset(before)


def current_task() -> str:
    return _task.get()


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one or several requests that are submitted together.

    `trained` are in forward or backward passes, `prefill` in scored sequences; a scored sequence
    has a token `sampled`, since the API has no request without one.
    """

    trained: int = 0
    prefill: int = 0
    sampled: int = 0


class Meter(Protocol):
    """Meter of a run."""

    def asked(self, task: str, work: Work) -> str:
        """Record work before it is submitted; return the name of the record."""
        ...

    def answered(self, asked: str, cached: int = 0) -> None:
        """Record that work was answered; `cached` tokens of its prefill were in the cache."""
        ...


class Unmetered:
    """Meter that keeps nothing, of a service without a run."""

    def asked(self, task: str, work: Work) -> str:
        return ""

    def answered(self, asked: str, cached: int = 0) -> None:
        pass
