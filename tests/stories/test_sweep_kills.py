"""A sweep of twelve runs in turn that is killed again and again, and repeats no finished run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.flows.recipe.plan import SweepRecipe
from ratchet.flows.stages import has_finished
from ratchet.flows.sweep import check_sweep, sweep
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.owners import Owner, last_owner
from ratchet.tasks.storage.run_folder import folder_of
from tests.support.processes import ROOT, wait_until
from tests.support.runs.small_recipe import small_recipe

RUNS = 12
KILLS_AFTER = (0, 2, 3, 5, 8, 10)
"""Numbers of finished runs, at each of which the sweep is killed some time later."""
BETWEEN_SECONDS = 6.0
"""A run takes about so long."""
SWEEP_SECONDS = 600
RECIPE = SweepRecipe.model_validate(
    {
        "base": small_recipe(steps=1, checkpoints={"every": 1}).model_dump(mode="json"),
        "listed": [{"optimizer.learning_rate": n / 1000} for n in range(1, RUNS + 1)],
    }
)


def finished(name: str) -> Mapping[str, Owner | None]:
    """Map the runs of a sweep that have finished to the process that had each open last."""
    runs = [child for child in check_sweep(RECIPE, name).children if has_finished(child)]
    return {child.name: last_owner(folder_of(child.name).owners) for child in runs}


def wait_for(count: int, name: str) -> None:
    """Wait until so many runs of a sweep have finished."""
    wait_until(f"{count} runs end", lambda: len(finished(name)) >= count, SWEEP_SECONDS)


@pytest.mark.story
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("root", "prefect_server", "no_tinker")
def test_a_sweep_of_twelve_killed_and_resumed_repeats_no_finished_run(tmp_path: Path) -> None:
    file = write_text(tmp_path / "sweep.yaml", RECIPE.model_dump_json())
    command = [
        sys.executable,
        "-m",
        "ratchet.flows.cli.main",
        "sweep",
        str(file),
        "--run",
        "killed",
    ]
    variables = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""}
    drawn, seen, opened = random.Random(0), dict[str, Owner | None](), dict[str, Owner | None]()
    for kills, count in enumerate([*KILLS_AFTER, RUNS]):
        words = [*command, "--if-exists", "resume"] if kills else command
        process = subprocess.Popen(
            words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if count < RUNS:
            wait_for(count, "killed")
            time.sleep(drawn.uniform(0, BETWEEN_SECONDS))
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=SWEEP_SECONDS)
        assert process.returncode == (-signal.SIGKILL if count < RUNS else 0), said.decode()
        opened = finished("killed")
        assert {name: opened[name] for name in seen} == seen
        seen = opened
    assert len(opened) == RUNS
    assert sum(owner.epoch > 1 for owner in opened.values() if owner) > 0, "none was interrupted"
    sweep(RECIPE, run="whole")
    assert list_faults(folder_of("killed"), read_contents(folder_of("whole"))) == []
