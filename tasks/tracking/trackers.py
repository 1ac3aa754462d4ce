"""Trackers of experiments, and Weights & Biases: metrics, tables and checkpoints of a run."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ratchet.adapters.calls import POLICY
from ratchet.tasks.checkpoints import Checkpoint
from ratchet.tasks.settings.run import Tracking
from ratchet.tasks.storage.files import remove_folder, write_text
from ratchet.tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from wandb import Run  # an extra

    from ratchet.tasks.tracking.recorded_step import RecordedStep  # loads slowly

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


class TrackerFailed(Exception):
    """Failure of a tracker: it may succeed later, and the run needs none of it."""


class Tracker(Protocol):
    """A tracker of experiments that has a run open; each method may raise TrackerFailed."""

    def next_step(self) -> int:
        """Return the first step that the tracker does not have."""
        ...

    def send(self, step: "RecordedStep") -> None:
        """Send a step that the tracker does not have."""
        ...

    def close(self) -> None:
        """Send what waits to be sent, all recorded steps having been given, and close the run."""
        ...


class WandbTracker(Tracker):
    """The W&B run of a run, which stays one run of W&B's by its id; `config` has no secrets.

    Without WANDB_API_KEY it is kept offline, for `wandb sync`; WANDB_MODE overrules that. Its
    newest offline folder has every step that is in no folder that was synced, so that one `wandb
    sync` sends the whole run; the others are removed.
    """

    def __init__(
        self, chosen: Tracking, run: RunFolder, run_id: str, config: Mapping[str, object]
    ) -> None:
        self._name, self._folder = run.name, run.tracking
        self._id, self._config, self._chosen = run_id, config, chosen
        with _failing():
            self._run = self._init()
            for split in ("test", "greedy", "judged"):
                self._run.define_metric(f"{split}/*", step_metric=f"{split}/checkpoint")

    def next_step(self) -> int:
        """Return the first step that neither W&B nor a synced folder has."""
        synced = (f for f in offline_folders(self._folder, self._id) if _is_synced(f))
        kept = (folder / NEXT_STEP for folder in synced)
        steps = [int(path.read_text()) for path in kept if path.exists()]
        with _failing():
            return max([self._run.step, *steps])

    def send(self, step: "RecordedStep") -> None:
        """Log a step, once its checkpoints are logged; W&B counts its own steps by the number."""
        scores = step.scores()
        splits = {name.partition("/")[0] for name in scores}
        values: dict[str, object] = {**step.metrics(), **scores}
        values |= {f"{split}/checkpoint": step.checkpoint for split in splits}
        with _failing():
            for name, rows in step.tables(self._chosen.rollouts).items():
                columns: list[Any] = [*rows[0]]
                values[name] = self._wandb.Table(columns, [[*row.values()] for row in rows])
            for policy, weights in step.weights().items():
                self._log_artifact(policy, weights)
            self._note(step.number + 1)
            self._run.log(values, step=step.number, commit=True)

    def close(self) -> None:
        """Finish the W&B run, and remove the offline folders that the newest one repeats."""
        if self._run.offline:
            *earlier, _ = offline_folders(self._folder, self._id)
            for folder in earlier:
                if not _is_synced(folder):
                    remove_folder(folder)
        with _failing():
            self._run.finish()

    def _note(self, next_step: int) -> None:
        """Note what the offline folder has before it has it: a step is never sent twice."""
        if self._run.offline:
            write_text(Path(self._run.settings.sync_dir) / NEXT_STEP, f"{next_step}")

    def _init(self) -> "Run":
        import wandb

        self._wandb = wandb
        self._folder.mkdir(parents=True, exist_ok=True)
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        settings = {
            name: value
            for name, value in SETTINGS.items()
            if f"WANDB_{name.upper()}" not in os.environ
        }
        wandb.setup(settings=wandb.Settings(**settings))  # it prints as that says
        return wandb.init(
            project=self._chosen.project,
            id=self._id,
            name=self._name,
            resume="allow",
            reinit="create_new",  # an agent in this process may have a W&B run of its own
            config=dict(self._config),
            dir=str(self._folder),
            mode=None if "WANDB_MODE" in os.environ else mode,
            settings=wandb.Settings(**settings),
        )

    def _log_artifact(self, policy: str, weights: Checkpoint) -> None:
        """Log a checkpoint by the service's addresses; no weights are copied."""
        name = self._name if policy == POLICY else f"{self._name}.{policy}"
        addresses = {"sampler": weights.sampler, "state": str(weights.state)}
        artifact = self._wandb.Artifact(
            name[-LONGEST_NAME:], "model", metadata={"step": weights.step, **addresses}
        )
        for what, address in addresses.items():
            artifact.add_reference(address, name=what, checksum=False)
        self._run.log_artifact(artifact, aliases=[f"step-{weights.step}"])


def offline_folders(folder: Path, run_id: str = "*") -> list[Path]:
    return sorted(folder.glob(f"wandb/offline-run-*-{run_id}"))


def unsynced_folder(folder: Path) -> Path | None:
    """Return the newest offline folder, unless `wandb sync` has sent it."""
    last = next(reversed(offline_folders(folder)), None)
    return None if last is None or _is_synced(last) else last


def _is_synced(folder: Path) -> bool:
    return any(folder.glob("*.wandb.synced"))


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
