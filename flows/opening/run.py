"""An open run: its folder, the service, the policies that it trains, and the record of a step."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.clock import STARTING, phases
from ratchet.adapters.redaction import public
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.engines import damaged_weights, needs_engine
from ratchet.adapters.tinker.service import Service, connect
from ratchet.adapters.tracking.tracker import TrackedRun, Tracker
from ratchet.adapters.tracking.wandb import WandbTracker
from ratchet.flows.checkpoints.binding import BoundCheckpoint, bind_checkpoints, carry_weights
from ratchet.flows.checkpoints.policies import RunPolicies, open_policies
from ratchet.flows.checkpoints.serving import open_checkpoints_of
from ratchet.flows.diagnosis.service import probe_service
from ratchet.flows.opening.checks import check_binding, check_run
from ratchet.flows.recipe.loading import read_lineage
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.recovery.retention import Retention
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.settings.run import Budget, Model
from ratchet.tasks.spending.ledger import SpentSoFar
from ratchet.tasks.spending.work_log import WorkLog, run_id
from ratchet.tasks.storage.dotted_keys import flatten
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import bind_run
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.tracking.prefect_pages import UI_NAME, PrefectPages, write_run_report
from ratchet.tasks.tracking.run_tracking import RunTracking

SPARE_CHECKPOINTS = 2
"""Checkpoints that a run needs beyond its lag: the newest, and that of a step that is resumed."""

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
    """Event that is set while something that the run needs is opened; a new run is deleted if it is
    still set at the end."""
    spending: SpentSoFar
    budget: Budget
    retention: Retention | None
    """Rule of the checkpoints that are kept; None keeps all."""

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
        step = self.start
        while step < self.end():
            yield step
            step += 1


@contextmanager
def open_run(recipe: RunRecipe, name: str, *, on_policy: bool = True) -> Iterator[OpenRun]:
    """Open a run, new or not. A new run that cannot be opened is deleted.

    Rebuilt weights must give the recorded log-probabilities if the run is `on_policy`, since then
    the same weights have sampled.
    """
    phases().enter(STARTING)  # again, if an engine has died
    check_run(recipe, folder_of(name))
    values, unusable = recipe.model_dump(mode="json"), Event()
    bound = {} if folder_of(name).exists() else _bind(recipe)
    check = partial(check_binding, recipe=recipe)  # another process may have made it meanwhile
    with (
        _delete_if(unusable, folder_of(name)),
        bind_run(name, values, recipe.fingerprint(), bound, check) as folder,
        staying(folder),
        _connect(recipe, folder) as service,
        _track(recipe, folder) as tracking,
    ):
        probe_service(recipe, folder, service)
        recipes = read_lineage(folder, recipe)
        policies = open_policies(recipe, recipes, folder, service, on_policy=on_policy)
        unusable.clear()
        kept = _retention(recipe, folder)
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
            retention=kept,
        )
        if tracking.is_followed:  # it has trained
            spending.record_rest()
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


@contextmanager
def staying(run: RunFolder) -> Iterator[None]:
    """Raise RunError if the block fails because the run's folder is gone."""
    try:
        yield
    except (OSError, UserError) as error:
        if is_written(run.manifest):
            raise
        raise RunError(
            f"the folder {run.path} was moved or removed while the run was open. Delete what is "
            f"left there, put the folder back, and run `ratchet resume {run.name}`"
        ) from error


@contextmanager
def _connect(recipe: RunRecipe, folder: RunFolder) -> Iterator[Service]:
    """Yield the service of a run; its own engine has the weights to which the run is bound."""
    carry_weights(recipe, folder, _make_whole)
    patience = recipe.service.timeout_seconds
    with connect(recipe.model.base, folder.engine, patience, WorkLog(folder)) as service:
        yield service


def _bind(recipe: RunRecipe) -> dict[str, Any]:
    """Describe the checkpoints to which a new run is bound, once damaged weights are made again."""
    bound = bind_checkpoints(recipe, {})
    described = {name: BoundCheckpoint.model_validate(one) for name, one in bound.items()}
    whole = not needs_engine(recipe.model.base) or not _make_whole(described)
    return bound if whole else bind_checkpoints(recipe, {})


def _make_whole(checkpoints: Mapping[str, BoundCheckpoint]) -> bool:
    """Have the runs of checkpoints make damaged weights again; return whether there were any.

    A checkpoint is rebuilt in its own run, whose engine writes the same bytes again.
    """
    damaged = [
        (name, policy)
        for name, bound in checkpoints.items()
        for policy, saved in bound.policies.items()
        for address in filter(None, (saved.sampler, saved.state))
        if damaged_weights(folder_of(bound.run).engine, address)
    ]
    for name, policy in dict.fromkeys(damaged):
        _make_again(name, checkpoints[name], policy)
    return bool(damaged)


def _make_again(name: str, bound: BoundCheckpoint, policy: str) -> None:
    log.warning("the weights of %s are damaged, and are made again", name)
    only = name.partition("@")[0].partition(":")[2]
    with_state = bound.policies[policy].state is not None
    with open_checkpoints_of(folder_of(bound.run)) as (_, updater_of):
        updater_of(only or policy).make_again(bound.step, with_state=with_state)


def _retention(recipe: RunRecipe, folder: RunFolder) -> Retention | None:
    """Return the rule of the checkpoints that a run keeps; None if it keeps all."""
    if (keep := recipe.checkpoints.keep) is None:
        return None

    def best_and_opponents(oldest: int) -> set[int]:
        held_out = read_facts(folder).held_out
        best = {held_out.best} if held_out.by_step else set[int]()
        left = range(oldest, recipe.steps + 1)
        return best.union(*(recipe.earlier(step).values() for step in left))

    return Retention(folder, max(keep, recipe.lag + SPARE_CHECKPOINTS), best_and_opponents)


def _track(recipe: RunRecipe, folder: RunFolder) -> RunTracking:
    """Return what follows a run; a run made in place of a deleted run has another id."""
    run = TrackedRun(
        name=folder.name,
        id=run_id(folder),
        config=public(flatten(recipe.model_dump(mode="json"))),
        folder=folder.tracking,
    )
    pages, chosen = PrefectPages(folder), recipe.tracking
    openers: dict[str, Callable[[], Tracker]] = {UI_NAME: lambda: pages}
    if chosen.project is not None:
        openers["W&B"] = partial(WandbTracker, chosen.project, chosen.rollouts, run)
    return RunTracking(folder, openers, recipe.steps, recipe.lag)
