"""An open run: its folder, the service, and the policies that it trains."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from threading import Event
from typing import Any

from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.service import Service
from ratchet.flows.checkpoints.policies import RunPolicies, open_policies
from ratchet.flows.checkpoints.serving import bind_new, connect_run
from ratchet.flows.opening.checks import check_run
from ratchet.flows.recipe.loading import check_binding, read_lineage
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.recipe.service_needs import probe_service
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.settings.run import Budget, Model
from ratchet.tasks.spending.ledger import SpentSoFar
from ratchet.tasks.spending.work_log import add_rest, run_id
from ratchet.tasks.storage.manifest import bind_run, changed_files, record_files, refuse_changed
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.tracking.prefect_pages import tracker_openers, write_run_report
from ratchet.tasks.tracking.run_tracking import RunTracking

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRun:
    """A run while a flow has it open."""

    folder: RunFolder
    service: Service
    policies: RunPolicies
    tracking: RunTracking
    steps: int
    on_policy: bool
    """Whether the run's own weights have sampled what it trains on."""
    unusable: Event
    """Set until the run is open. A new run's folder is deleted if it is still set at exit."""
    spending: SpentSoFar
    budget: Budget

    @property
    def ledger(self) -> Ledger:
        """Checkpoints of the main policy; every policy has the same steps."""
        return self.policies.main.ledger

    def chat(self, model: Model) -> Chat:
        """Return the chat of the model that is trained, by the tokenizer of the service."""
        tokenizer = self.service.tokenizer(self.ledger.at(0).sampler, model.base)
        return Chat(tokenizer, model.renderer, self.service.context(model.base), model.thinking)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Have a new run deleted if the block fails."""
        self.unusable.set()
        yield
        self.unusable.clear()

    def end(self) -> int:
        """Return the number of steps after which the run ends, as far as it is known."""
        return self.folder.steps_of(self.steps)

    def steps_left(self) -> "StepsLeft":
        """Return the steps that are not done; a step is done when its metrics are recorded."""
        return StepsLeft(steps_done(self.folder.metrics), self.end)


@dataclass(frozen=True)
class StepsLeft:
    """Steps from `start` on, before an `end` that may come nearer while they are done."""

    start: int
    end: Callable[[], int]

    def __iter__(self) -> Iterator[int]:
        return takewhile(lambda step: step < self.end(), count(self.start))


@contextmanager
def open_run(
    recipe: RunRecipe, name: str, *, on_policy: bool = True, played: RunRecipe | None = None
) -> Iterator[OpenRun]:
    """Open a run, new or not, also to have what another recipe says `played` with its weights.

    A new run that cannot be opened is deleted. Rebuilt weights must give the recorded
    log-probabilities if the run is `on_policy`, since then the same weights have sampled.
    """
    check_run(recipe, run := folder_of(name))
    values, unusable = recipe.model_dump(mode="json"), Event()
    files = (played or recipe).checksums(run)
    further = {} if run.exists() else {"bound": bind_new(recipe), "files": files}

    def check(run: RunFolder) -> None:  # another process may have made it meanwhile
        check_binding(run, recipe)
        if played is None:
            refuse_changed(run, files)
        else:
            run.refuse_elsewhere()
        new = dict(files.items() - changed_files(run, files).items())
        record_files(run, new, steps_done(run.metrics))

    with (
        _delete_if(unusable, folder_of(name)),
        bind_run(name, values, recipe.fingerprint(), further, check) as folder,
        connect_run(recipe, folder) as service,
        _follow(recipe, folder, values) as tracking,
    ):
        probe_service(recipe, folder, service)
        recipes = read_lineage(folder, recipe)
        policies = open_policies(recipe, recipes, folder, service, on_policy=on_policy)
        unusable.clear()
        spending = SpentSoFar(folder)
        yield OpenRun(
            folder=folder,
            service=service,
            policies=policies,
            tracking=tracking,
            steps=recipe.steps,
            on_policy=on_policy,
            unusable=unusable,
            spending=spending,
            budget=recipe.budget,
        )
        if tracking.is_followed:  # it has trained
            add_rest(folder, spending.since_last())
            write_run_report(folder)


@contextmanager
def _delete_if(unusable: Event, run: RunFolder) -> Iterator[None]:
    """Delete a new run unless the block clears `unusable`."""
    new = not run.exists()
    unusable.set()
    try:
        yield
    finally:
        if new and unusable.is_set() and run.exists():
            run.delete()


def _follow(recipe: RunRecipe, folder: RunFolder, values: dict[str, Any]) -> RunTracking:
    """Return what follows a run; a run made in place of a deleted run has another id."""
    openers = tracker_openers(folder, run_id(folder), values, recipe.tracking)
    return RunTracking(folder, openers, recipe.steps, recipe.lag)
