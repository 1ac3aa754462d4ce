"""Weights & Biases: metrics, tables and checkpoints of a run, which stays one run of W&B's."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.adapters.tracking.tracker import (
    SavedWeights,
    TrackedRun,
    TrackedStep,
    Tracker,
    TrackerFailed,
)

if TYPE_CHECKING:  # wandb is an extra
    from wandb import Run

INIT_SECONDS, FINISH_SECONDS = 25, 30
LONGEST_NAME = 128
"""Letters of an artifact's name."""

SETTINGS: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "finish_timeout": FINISH_SECONDS,
    "init_timeout": INIT_SECONDS,
}
"""Settings without which W&B prints, and sends what no recipe has: the command, the machine, its
packages and its load. A variable WANDB_… of a setting's name overrules each."""

NEXT_STEP = "next_step"
"""File of an offline folder with the first step that is not in it."""


class WandbTracker(Tracker):
    """The W&B run of a run.

    Without WANDB_API_KEY it is kept offline, for `wandb sync`; WANDB_MODE overrules that. Its
    newest offline folder has every step that is in no folder that was synced, so that one `wandb
    sync` sends the whole run; the others are removed.
    """

    def __init__(self, project: str, rollouts: int, run: TrackedRun) -> None:
        self._name, self._most, self._folder = run.name, rollouts, run.folder
        self._id = run.id
        with _failing():
            self._run = _init(project, run)
            for split in ("test", "greedy", "judged"):
                self._run.define_metric(f"{split}/*", step_metric=f"{split}/checkpoint")

    def next_step(self) -> int:
        """Return the first step that neither W&B nor a synced folder has."""
        synced = (f for f in offline_folders(self._folder, self._id) if _is_synced(f))
        kept = (folder / NEXT_STEP for folder in synced)
        steps = [int(path.read_text()) for path in kept if path.exists()]
        with _failing():
            return max([self._run.step, *steps])

    def send(self, step: TrackedStep) -> None:
        """Log a step, once its checkpoints are logged; W&B counts its own steps by the number."""
        import wandb

        scores = step.scores()
        splits = {name.partition("/")[0] for name in scores}
        values: dict[str, object] = {**step.metrics(), **scores}
        values |= {f"{split}/checkpoint": step.checkpoint for split in splits}
        with _failing():
            for name, rows in step.tables(self._most).items():
                columns: list[Any] = [*rows[0]]
                values[name] = wandb.Table(columns, [[*row.values()] for row in rows])
            for weights in step.weights():
                self._log_artifact(weights)
            self._note(step.number + 1)
            self._run.log(values, step=step.number, commit=True)

    def close(self) -> None:
        """Finish the W&B run, and remove the offline folders that the newest one repeats."""
        if self._run.offline:
            *earlier, _ = offline_folders(self._folder, self._id)
            for folder in earlier:
                if not _is_synced(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        with _failing():
            self._run.finish()

    def _note(self, next_step: int) -> None:
        """Note what the offline folder has before it has it: a step is never sent twice."""
        if self._run.offline:
            note = Path(self._run.settings.sync_dir) / NEXT_STEP
            unfinished = note.with_suffix(".new")
            unfinished.write_text(f"{next_step}")
            unfinished.replace(note)  # a kill leaves a whole note

    def _log_artifact(self, weights: SavedWeights) -> None:
        """Log a checkpoint by the service's addresses; no weights are copied."""
        import wandb

        name = f"{self._name}.{weights.policy}" if weights.policy else self._name
        addresses = {"sampler": weights.sampler, "state": weights.state}
        artifact = wandb.Artifact(
            name[-LONGEST_NAME:], "model", metadata={"step": weights.step, **addresses}
        )
        for what, address in addresses.items():
            artifact.add_reference(address, name=what, checksum=False)
        self._run.log_artifact(artifact, aliases=[f"step-{weights.step}"])


def offline_folders(folder: Path, run_id: str = "*") -> list[Path]:
    """List the offline folders of a run, the oldest first."""
    return sorted(folder.glob(f"wandb/offline-run-*-{run_id}"))


def unsynced_folder(folder: Path) -> Path | None:
    """Return the newest offline folder, unless `wandb sync` has sent it."""
    last = next(reversed(offline_folders(folder)), None)
    return None if last is None or _is_synced(last) else last


def _is_synced(folder: Path) -> bool:
    return any(folder.glob("*.wandb.synced"))


def _init(project: str, run: TrackedRun) -> "Run":
    import wandb

    run.folder.mkdir(parents=True, exist_ok=True)
    mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    settings = {
        name: value for name, value in SETTINGS.items() if f"WANDB_{name.upper()}" not in os.environ
    }
    wandb.setup(settings=wandb.Settings(**settings))  # it prints as that says
    return wandb.init(
        project=project,
        id=run.id,
        name=run.name,
        resume="allow",
        reinit="create_new",  # an agent in this process may have a W&B run of its own
        config=dict(run.config),
        dir=str(run.folder),
        mode=None if "WANDB_MODE" in os.environ else mode,
        settings=wandb.Settings(**settings),
    )


@contextmanager
def _failing() -> Iterator[None]:
    """Raise TrackerFailed for an error of W&B's."""
    from wandb import Error
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
    from wandb.sdk.mailbox.mailbox_handle import ServerResponseError

    of_its_process = HandleAbandonedError, MailboxClosedError, ServerResponseError
    try:
        yield
    except (Error, *of_its_process, OSError, ValueError, RuntimeError) as error:
        raise TrackerFailed(f"{type(error).__name__}: {error}") from error
