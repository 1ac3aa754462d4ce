"""Metrics → Weights & Biases, if a project is named. A run that continues, continues there too."""

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from adapters.errors import UserError

SECRET_NAME = re.compile(r"(api_?key|secret|password|credentials?|token)$", re.I)
SECRET_VARIABLE = re.compile(r"_(KEY|TOKEN|SECRET|PASSWORD)$")


class Tracker:
    """Logs a run's metrics to W&B; without a project it does nothing, and imports nothing.

    The W&B run's id derives from `run`, so a run that is started again goes on where it was.
    Without WANDB_API_KEY it is kept offline in `folder`, for `wandb sync`; WANDB_MODE overrules.
    """

    def __init__(
        self, project: str | None, run: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        self._run: Any = None
        if project is None:
            return
        wandb = _imported()
        folder.mkdir(parents=True, exist_ok=True)
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._run = wandb.init(
            project=project,
            id=run_id(project, run),
            name=run,
            resume="allow",
            config=public(config),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", mode),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a step's metrics; W&B ignores a step that is not after those it has."""
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Send what waits. Nothing is logged afterwards."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def run_id(project: str, run: str) -> str:
    """The W&B id of a run: the same for ever, and legal whatever the run is called."""
    return sha256(f"{project}/{run}".encode()).hexdigest()[:16]


def public(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config less what is named like a secret, or is the value of one in the environment."""
    variables = os.environ.items()
    secrets = {value for name, value in variables if value and SECRET_VARIABLE.search(name)}
    return {
        name: public(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not SECRET_NAME.search(name) and not (isinstance(value, str) and value in secrets)
    }


def _imported() -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError(
            "the recipe names a tracking project, and wandb is not installed: "
            "`pip install 'ratchet-rl[tracking]'`, or leave tracking.project empty"
        ) from error
    return wandb
