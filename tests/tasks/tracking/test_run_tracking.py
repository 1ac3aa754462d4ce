"""A run's trackers: each step once, whatever kills the run, and no failure that reaches it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.tasks.settings.run import Tracking
from ratchet.tasks.tracking.recorded_step import RecordedStep
from ratchet.tasks.tracking.run_tracking import RunTracking
from ratchet.tasks.tracking.trackers import (
    Tracker,
    TrackerFailed,
    WandbTracker,
    offline_folders,
    unsynced_folder,
)
from tests.support.processes import ROOT, wait_until
from tests.support.runs.tracked_run import GrowingRun
from tests.support.wandb_files import artifacts, config, history

STEPS = 4


class ListTracker(Tracker):
    """A tracker that keeps the numbers of what it is sent, and fails where it is told to."""

    def __init__(self, had: int = 0) -> None:
        self.had, self.sent, self.scores = had, list[int](), dict[int, float]()
        self.failures: list[int] = []
        self.closed = False

    def next_step(self) -> int:
        return max([self.had, *(number + 1 for number in self.sent)])

    def send(self, step: RecordedStep) -> None:
        if step.number in self.failures:
            self.failures.remove(step.number)
            raise TrackerFailed("the server is away")
        self.sent.append(step.number)
        if scores := step.scores():
            self.scores[step.number] = scores["test/reward/mean"]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path) -> GrowingRun:
    """A run of no step."""
    return GrowingRun(tmp_path / "fox")


def open_wandb(run: GrowingRun) -> dict[str, Callable[[], Any]]:
    chosen, config = Tracking(project="demo", rollouts=1), {"steps": STEPS, "rollouts.groups": 1}
    return {"W&B": partial(WandbTracker, chosen, run.folder, "0a1b2c", config)}


def grow(run: GrowingRun, openers: Any, first: int, last: int, lag: int = 0) -> None:
    """Train some steps, each followed by the trackers."""
    with RunTracking(run.folder, openers, STEPS, lag) as tracking:
        tracking.follow()
        for step in range(first, last):
            if step >= lag and not run.folder.evaluations(f"{step - lag:05d}"):
                run.evaluate(step - lag)
            run.step(step)
            tracking.follow()
        if last == STEPS:
            for checkpoint in range(STEPS - lag, STEPS + 1):
                run.evaluate(checkpoint)


@pytest.mark.parametrize("lag", [0, 2])
def test_each_step_is_sent_with_the_evaluation_that_is_known_by_then(
    run: GrowingRun, lag: int
) -> None:
    tracker = ListTracker()
    grow(run, {"list": lambda: tracker}, 0, STEPS, lag)
    assert tracker.sent == [*range(STEPS + lag + 1)]
    known = {number: (number - lag) / 10 for number in range(lag, STEPS + lag + 1)}
    assert tracker.scores == pytest.approx(known)
    assert tracker.closed


def test_a_run_that_goes_on_sends_what_the_tracker_does_not_have(run: GrowingRun) -> None:
    for step in range(2):
        run.evaluate(step)
        run.step(step)
    tracker = ListTracker(had=1)
    grow(run, {"list": lambda: tracker}, 2, STEPS)
    assert tracker.sent == [1, 2, 3, 4]


def test_a_run_that_is_not_followed_opens_no_tracker(run: GrowingRun) -> None:
    run.step(0)
    opened: list[ListTracker] = []

    def open_one() -> ListTracker:
        opened.append(ListTracker())
        return opened[-1]

    with RunTracking(run.folder, {"list": open_one}, STEPS, 0):
        pass
    assert opened == []


def test_a_tracker_that_fails_is_said_once_and_has_the_rest_later(
    run: GrowingRun, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = ListTracker()
    tracker.failures = [0, 0, 1]
    with RunTracking(run.folder, {"list": lambda: tracker}, STEPS, 0) as tracking:
        run.step(0)
        run.step(1)
        for left in ([0, 1], [1], []):
            tracking.follow()
            wait_until("a failure", partial(lambda left: tracker.failures == left, left))
    assert tracker.sent == [0, 1]
    [said] = [record.getMessage() for record in caplog.records]
    assert "list does not have all of the run: the server is away" in said


def test_wandb_has_the_config_the_metrics_the_tables_and_the_checkpoints(run: GrowingRun) -> None:
    pytest.importorskip("wandb")
    grow(run, open_wandb(run), 0, STEPS)
    [folder] = offline_folders(run.folder.tracking)
    assert folder == unsynced_folder(run.folder.tracking)
    assert config(folder).items() >= {"steps": STEPS, "rollouts.groups": 1}.items()
    rows = history(folder)
    assert [row["_step"] for row in rows] == [*range(STEPS + 1)]
    assert [row["reward/mean"] for row in rows[:-1]] == [*range(STEPS)]
    assert [row["test/checkpoint"] for row in rows] == [*range(STEPS + 1)]
    assert {row["rollouts.nrows"] for row in rows[:-1]} == {1}
    table = (folder / "files" / rows[0]["rollouts.path"]).read_text()
    assert "ValueError: no answer" in table
    saved = artifacts(folder)
    assert [(one.name, sorted(one.aliases)) for one in saved] == [
        ("fox", ["latest", "step-2"]),
        ("fox", ["latest", "step-4"]),
    ]
    assert {entry.ref for entry in saved[1].manifest.contents} == {
        "tinker://run/sampler/4",
        "tinker://run/weights/4",
    }


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.runs.tracked_run import GrowingRun
from tests.support.processes import wait_until
from tests.tasks.tracking.test_run_tracking import open_wandb
from ratchet.tasks.tracking.run_tracking import RunTracking

run, first = GrowingRun(Path(sys.argv[1])), int(sys.argv[2])
sent = lambda: [int(note.read_text()) for note in run.folder.tracking.glob("*/offline-*/next_step")]
with RunTracking(run.folder, open_wandb(run), 4, 0) as tracking:
    for step in (first, first + 1):
        run.evaluate(step)
        run.step(step)
        if step == first:
            tracking.follow()
            wait_until("the step is sent", lambda: step + 1 in sent(), 240)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(words: Sequence[str]) -> bool:
    """Return whether a process has these words in its command."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return any({*words} <= {*command} for command in commands)


@pytest.mark.story
def test_a_run_that_is_killed_is_one_wandb_run_with_each_step_once(run: GrowingRun) -> None:
    pytest.importorskip("wandb")
    # WANDB_SERVICE would share this process's service, which nobody kills.
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**own, "PYTHONPATH": str(ROOT)}
    for first in (0, 2):
        command = [sys.executable, "-c", KILLED, str(run.folder.path), str(first)]
        killed = subprocess.Popen(command, env=environment)
        assert killed.wait() == -signal.SIGKILL
        service = "--pid", f"{killed.pid}"  # W&B's own, which may still write
        wait_until("its service ends", lambda service=service: not is_running(service), 60)
    assert len(offline_folders(run.folder.tracking)) == 2
    grow(run, open_wandb(run), STEPS, STEPS)
    [folder] = offline_folders(run.folder.tracking)
    assert folder.name.endswith("-0a1b2c")
    assert [row["_step"] for row in history(folder)] == [*range(STEPS + 1)]


def test_what_was_synced_is_not_logged_again(run: GrowingRun) -> None:
    pytest.importorskip("wandb")
    grow(run, open_wandb(run), 0, 2)
    [synced] = offline_folders(run.folder.tracking)
    assert [row["_step"] for row in history(synced)] == [0, 1]
    (synced / "run-0a1b2c.wandb.synced").touch()  # as `wandb sync` does
    assert unsynced_folder(run.folder.tracking) is None
    grow(run, open_wandb(run), 2, STEPS)
    first, second = offline_folders(run.folder.tracking)
    assert first == synced
    assert [row["_step"] for row in history(second)] == [2, 3, 4]
    assert second == unsynced_folder(run.folder.tracking)
