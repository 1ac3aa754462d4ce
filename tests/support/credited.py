"""Datums and recorded steps, made of trajectories by one credit assignment."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from tinker import Datum

from ratchet.tasks import datums
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.datums import UpdateMethod, to_datums
from ratchet.tasks.recovery.recorded_steps import RecordedSteps, TrainedPolicy
from ratchet.tasks.recovery.rollout_steps import RolloutSteps
from ratchet.tasks.rewards import compute_rewards, rewards_of
from ratchet.tasks.settings.algorithm import Algorithm, CreditAssignment
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table


def credited(advantage: str, min_group_size: int = 1, **settings: Any) -> CreditAssignment:
    """Return the credit assignment of an algorithm that has the other settings."""
    algorithm = Algorithm.model_validate({"advantage": advantage, **settings})
    return CreditAssignment(algorithm, min_group_size)


def build(
    trajectories: pa.Table,
    credit: CreditAssignment,
    references: Mapping[str, pa.Table] | None = None,
) -> pa.Table:
    rewards = rewards_of(trajectories, credit.algorithm.rewards)
    return datums.datums_of(trajectories, rewards, credit, references)


def write_datums(path: Path, trajectories: Path, credit: CreditAssignment) -> None:
    """Write the datums of a file of trajectories anew, and beside it no file of rewards."""
    path.unlink(missing_ok=True)
    rewards = path.with_name(f"{path.stem}.rewards")
    compute_rewards.make(rewards, trajectories, credit.algorithm.rewards)
    datums.build_datums.make(path, trajectories, rewards, credit)
    rewards.unlink()


def rewards_by_group(
    trajectories: pa.Table, role: str = "policy", shaping: str | None = None
) -> dict[str, dict[str, float]]:
    """Map group → rollout → reward of one role."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rewards_of(trajectories, shaping).to_pylist():
        if row["role"] == role:
            groups[row["group_id"]][row["rollout_id"]] = row["reward"]
    return dict(groups)


def recorded_steps(
    run: RunFolder, policy: TrainedPolicy, credit: CreditAssignment, method: UpdateMethod
) -> RecordedSteps:
    """Return the recorded steps of a run of rollouts, all by one credit assignment and method."""
    source = RolloutSteps(run, policy, ByStep(((0, credit),)))
    return RecordedSteps(run, policy, ByStep(((0, method),)), source)


def read_datums(path: Path, loss: str, settings: Settings | None = None) -> list[Datum]:
    """Read a training batch as Tinker's datums."""
    return to_datums(read_table(path), loss, settings)
