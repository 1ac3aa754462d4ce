"""Doors in processes of their own change nothing of a run, also if an engine or a door dies."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.doors import processes
from tasks.doors.here import HeldBatch
from tasks.doors.processes import FarBatch
from tasks.rollouts import Play, RolloutHost
from tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch

RECIPE = small_recipe(
    rollouts={"groups": 4, "group_size": 4, "max_tokens": 16, "batches": 2, "lag": 1},
)

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")

whole = fixture_of(RECIPE)


@contextmanager
def nothing_dying() -> Iterator[None]:
    yield


@contextmanager
def door_dying(name: str, by: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    """Send the door of a batch a signal as soon as the batch is to be played for the first time."""
    play, killed = RolloutHost.play, list[int]()

    def die(host: RolloutHost, batch: HeldBatch, how: Play) -> None:
        assert isinstance(batch, FarBatch)
        if batch.name == name and not killed:
            killed.append(batch.door.process)
            os.kill(killed[0], by)
        play(host, batch, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutHost, "play", die)
        yield
    assert killed


@pytest.mark.parametrize(
    "dying",
    [
        nothing_dying(),
        door_dying("train-00001.0"),
        door_dying("train-00001.0", signal.SIGSTOP),
        dying_in_batch("train-00001.0"),
    ],
)
def test_a_run_is_the_same_with_doors_of_its_own(
    dying: AbstractContextManager[None],
    whole: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(processes, "LONGEST_WAIT", 3.0)
    assert differences(die_and_go_on(RECIPE, dying, tmp_path), whole) == []


def test_a_machine_of_two_cores_has_no_door_of_its_own_and_a_larger_one_has_some() -> None:
    assert [RECIPE.doors(cores) for cores in (1, 2, 3, 7, 8, 16, 64)] == [0, 0, 1, 1, 2, 4, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"roles": {"policy": "policy", "helper": "function:math:sqrt"}},
        {"roles": {"policy": "policy", "helper": "openai/gpt"}},
    ],
)
def test_what_no_saved_weights_answer_stays_in_the_process_of_the_flow(
    changes: dict[str, Any],
) -> None:
    assert small_recipe(**changes).doors(16) == 0
