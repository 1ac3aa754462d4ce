"""The trackers that a recipe chooses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

from adapters.errors import UserError
from adapters.tracking.mlflow import MlflowTracker
from adapters.tracking.opentelemetry import OpenTelemetryTracker
from adapters.tracking.tracker import TrackedRun, Tracker
from adapters.tracking.wandb import WandbTracker

OpenTracker = Callable[[TrackedRun], Tracker]

EXPORTER = "opentelemetry.exporter.otlp.proto.http"


@dataclass(frozen=True, slots=True)
class TrackerChoice:
    """The recipe's section `tracking`, whose keys it has."""

    project: str | None = None
    experiment: str | None = None
    opentelemetry: Literal["calls", "messages"] | None = None
    rollouts: int = 0

    def openers(self) -> Mapping[str, OpenTracker]:
        """Map the name of each chosen tracker to what opens a run in it."""
        openers: dict[str, OpenTracker] = {}
        if self.project is not None:
            openers["W&B"] = partial(WandbTracker, self.project, self.rollouts)
        if self.experiment is not None:
            openers["MLflow"] = partial(MlflowTracker, self.experiment)
        if self.opentelemetry is not None:
            messages = self.opentelemetry == "messages"
            openers["OpenTelemetry"] = partial(OpenTelemetryTracker, messages)
        return openers

    def check(self) -> None:
        """Refuse (UserError) a tracker whose library, which is not imported, is not installed."""
        needed = {"project": "wandb", "experiment": "mlflow", "opentelemetry": EXPORTER}
        for key, library in needed.items():
            if getattr(self, key) is not None and not _is_installed(library):
                raise UserError(
                    f"the recipe has tracking.{key}, and {library} is not installed: "
                    f"`pip install 'ratchet-rl[tracking]'`, or leave tracking.{key} empty"
                )


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # a package that it lies in
        return False
