"""Phases of a command's time: each has its own, and together they are all of it."""

import re

import pytest

from ratchet.adapters.process.clock import EVALUATION, STARTING, TRAINING, Phases


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number that a test changes."""
    time = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: time[0])
    return time


def test_the_time_before_the_first_phase_is_the_start_s(now: list[float]) -> None:
    spent = Phases(age=7)
    now[0] += 3
    assert spent.describe() == "10 s"


def test_a_phase_within_another_one_has_its_time_alone(now: list[float]) -> None:
    spent = Phases(age=2)
    assert spent.enter(TRAINING) == STARTING
    now[0] += 5
    with spent.within(EVALUATION):
        now[0] += 4
    now[0] += 1
    assert spent.describe() == "12 s: 2 s to start, 6 s of training, 4 s of evaluation"


def test_a_phase_that_fails_ends_too(now: list[float]) -> None:
    spent = Phases(age=0)
    spent.enter(TRAINING)

    def fail() -> None:
        now[0] += 4
        raise OSError

    with pytest.raises(OSError), spent.within(EVALUATION):  # noqa: PT011
        fail()
    now[0] += 3
    assert spent.describe() == "7 s: 3 s of training, 4 s of evaluation"


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.5, 0.6])
def test_rounded_parts_add_up_to_the_whole(fraction: float, now: list[float]) -> None:
    spent = Phases(age=1 + fraction)
    for phase in (TRAINING, EVALUATION, "of more", "of the end"):
        spent.enter(phase)
        now[0] += 2 + fraction
    whole, *parts = map(int, re.findall(r"\d+", spent.describe()))
    assert sum(parts) == whole
