"""A flow that trains datums which no rollout made; run, it is killed between two updates.

    python -m tests.support.runs.given_datums RUN PHASE

kills its own process where checkpoint 3 is to be noted as begun (`begin`), or as saved (`add`).
"""

import os
import signal
import sys
from pathlib import Path

import pyarrow as pa
from prefect import flow

from ratchet.adapters.calls import POLICY
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.opening.flow_runs import name_of_run
from ratchet.flows.opening.run import open_run
from ratchet.flows.opening.step_records import measure_of, record_step
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.datums import DATUM_SCHEMA
from ratchet.tasks.metrics import StepFiles
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.tables import write_table
from ratchet.tasks.datums import UpdateMethod
from ratchet.tasks.updates import update_policy

LISTS = ("tokens", "targets", "logprobs", "advantages", "mask")


@durable
def count_on(path: Path, step: int) -> None:
    """Write datums that count on from the step's number; no policy sampled them."""
    ones, rows = [1] * 7, []
    for first in (3 * step + 1, 3 * step + 2):
        tokens, targets = [*range(first, first + 7)], [*range(first + 1, first + 8)]
        lists = dict(zip(LISTS, (tokens, targets, [0.0] * 7, ones, ones), strict=True))
        rows.append({**lists, "scale": 1 / 14})
    write_table(pa.Table.from_pylist(rows, schema=DATUM_SCHEMA), path)


class CountingRecipe(RunRecipe):
    """The recipe of `count`."""

    flow: str = "count"

    def update_method(self) -> UpdateMethod:
        return self.minimize("cross_entropy", {})


@flow(flow_run_name=name_of_run)
def count(recipe: CountingRecipe, run: str) -> None:
    """Train a model to count."""
    with open_run(recipe, run) as opened:
        for step in opened.steps_left():
            datums = count_on(opened.folder.datums(POLICY, step), step)
            path, updater = opened.folder.update(POLICY, step), opened.policies.main.updater
            update_policy(path, updater, step, [datums])
            files = StepFiles([], None, {}, datums)
            record_step(opened, step, {POLICY: measure_of(opened.policies.main, step, files)})


RECIPE = CountingRecipe.model_validate(
    {
        "steps": 5,
        "model": {"lora_rank": 4},
        "optimizer": {"learning_rate": 0.01},
        "checkpoints": {"every": 2},
    }
)


def kill_at(phase: str) -> None:
    """Have this process killed when the ledger is told of checkpoint 3."""
    note = getattr(Ledger, phase)

    def note_or_die(ledger: Ledger, noted: int | Checkpoint) -> None:
        if (noted if isinstance(noted, int) else noted.step) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        note(ledger, noted)

    setattr(Ledger, phase, note_or_die)


if __name__ == "__main__":
    kill_at(sys.argv[2])
    count(RECIPE, run=sys.argv[1])
