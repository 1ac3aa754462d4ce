"""When torch's threads share the operations of a step."""

import time

import pytest
import torch

from ratchet.engine.model.products import MOST_APART, Workers


class Clocks:
    """Clocks of the machine and of the process, which a step puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.used = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(time, "process_time", lambda: self.used)

    def step(self, used: float) -> int:
        """Take a second, of which so much was used; return the number of torch's threads."""
        self.wall += 1
        self.used += used
        return torch.get_num_threads()


def test_disturbed_steps_are_followed_by_ever_more_steps_that_are_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks, two = Clocks(monkeypatch), Workers(2)
    assert two.may_share()
    assert two.share(clocks.step, 1.9) == 2
    assert torch.get_num_threads() == 1
    assert two.may_share()
    for apart in (1, 2, 4):
        two.share(clocks.step, 1.2)
        assert [two.may_share() for _ in range(apart + 1)] == [False] * apart + [True]
    for _ in range(10):
        two.share(clocks.step, 1.2)
    assert [two.may_share() for _ in range(MOST_APART + 1)] == [False] * MOST_APART + [True]
    two.share(clocks.step, 1.9)
    two.share(clocks.step, 1.2)
    assert [two.may_share() for _ in range(2)] == [False, True]


def test_one_thread_shares_nothing() -> None:
    assert not Workers(1).may_share()


def test_a_step_that_fails_leaves_one_thread() -> None:
    def fail(step: str) -> None:
        raise ValueError(step)

    with pytest.raises(ValueError, match="a step"):
        Workers(2).share(fail, "a step")
    assert torch.get_num_threads() == 1
