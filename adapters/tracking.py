"""Metrics sent to Weights & Biases, where a run that continues here continues too."""

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from adapters.errors import UserError

if TYPE_CHECKING:  # wandb is an extra
    from wandb import Run

SECRET_NAME = re.compile(r"(api_?key|secret|password|credentials?|token)$", re.I)
SECRET_VARIABLE = re.compile(r"_(KEY|TOKEN|SECRET|PASSWORD)$")


def check_tracking(project: str | None) -> None:
    """Refuse (UserError) a project if wandb, which is not imported here, is not installed."""
    if project is not None and find_spec("wandb") is None:
        raise UserError(
            "the recipe names a tracking project, and wandb is not installed: "
            "`pip install 'ratchet-rl[tracking]'`, or leave tracking.project empty"
        )


class Tracker:
    """The W&B run of a run; without a project it does nothing and imports nothing.

    Its id derives from `run`, so a run that is started again continues the same W&B run. Without
    WANDB_API_KEY it is kept offline in `folder`, for `wandb sync`; WANDB_MODE overrules that.
    """

    def __init__(
        self, project: str | None, run: str, config: Mapping[str, object], folder: Path
    ) -> None:
        self._run: Run | None = None
        if project is None:
            return
        check_tracking(project)
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._run = wandb.init(
            project=project,
            id=run_id(project, run),
            name=run,
            resume="allow",
            config=public(config),
            dir=str(folder),
            mode=None if "WANDB_MODE" in os.environ else mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Send the metrics that wait to be sent. Later calls of `log` do nothing."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a step's metrics; W&B ignores a step that is not later than all it has."""
        if self._run is not None:
            self._run.log(dict(metrics), step=step)


def run_id(project: str, run: str) -> str:
    """Derive a run's W&B id, which is legal whatever the run's name is."""
    return sha256(f"{project}/{run}".encode()).hexdigest()[:16]


def public(config: Mapping[str, object]) -> dict[str, object]:
    """Copy the config without its secrets.

    A secret has a name like one, or is the value of an environment variable with such a name.
    """
    variables = os.environ.items()
    secrets = {value for name, value in variables if value and SECRET_VARIABLE.search(name)}
    return {
        name: public(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not SECRET_NAME.search(name) and not (isinstance(value, str) and value in secrets)
    }
