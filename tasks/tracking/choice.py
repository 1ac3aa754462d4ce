"""The trackers that a recipe chooses."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

from adapters.errors import UserError
from adapters.tracking.mlflow import MlflowTracker
from adapters.tracking.opentelemetry import OpenTelemetryTracker
from adapters.tracking.tracker import TrackedRun, Tracker
from adapters.tracking.wandb import WandbTracker
from tasks.settings.run import Tracking

OpenTracker = Callable[[TrackedRun], Tracker]

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
LIBRARIES = {"project": "wandb", "experiment": "mlflow", "opentelemetry": EXPORTER}
"""Key of `tracking` → the library that it needs."""


def tracker_openers(chosen: Tracking) -> Mapping[str, OpenTracker]:
    """Map the name of each chosen tracker to what opens a run in it."""
    openers: dict[str, OpenTracker] = {}
    if chosen.project is not None:
        openers["W&B"] = partial(WandbTracker, chosen.project, chosen.rollouts)
    if chosen.experiment is not None:
        openers["MLflow"] = partial(MlflowTracker, chosen.experiment)
    if chosen.opentelemetry is not None:
        openers["OpenTelemetry"] = partial(OpenTelemetryTracker, chosen.opentelemetry == "messages")
    return openers


def check_trackers(chosen: Tracking) -> None:
    """Refuse (UserError) a tracker whose library, which is not imported, is not installed."""
    for key, library in LIBRARIES.items():
        if getattr(chosen, key) is not None and not _is_installed(library):
            raise UserError(
                f"the recipe has tracking.{key}, and {library} is not installed: "
                f"`pip install 'ratchet-rl[tracking]'`, or leave tracking.{key} empty"
            )


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # a package that it lies in
        return False
