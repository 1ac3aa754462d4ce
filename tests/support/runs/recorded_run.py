"""A run with one step of two rollouts: a journal and the three Parquet files made from it."""

from pathlib import Path

from ratchet.adapters.calls import POLICY
from ratchet.adapters.rewards import Reward
from ratchet.tasks.recording.journal import seal
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, write_datums
from tests.tasks.test_journal import call, ended, written

BATCH = "train-00000.0"
CENTRED = credited("centred")


def record_run(folder: Path) -> RunFolder:
    """Record the rollouts of a step, and make its trajectories and its four datums."""
    run = RunFolder(folder)
    group = {"group_id": "train-00000-0000", "kept_how": "new", "policy_version": "00000"}
    spans = [call(number, rollout) | group for number in (1, 2) for rollout in (0, 1)]
    for rollout in (0, 1):
        spans.append(ended(f"train-00000-0000-0{rollout}", Reward(float(rollout))))
    sealed = seal(written(run.journal(BATCH), *spans), run.spans(BATCH))
    assemble_trajectories.make(run.trajectories(POLICY, 0), [sealed])
    write_datums(run.datums(POLICY, 0), run.trajectories(POLICY, 0), CENTRED)
    return run
