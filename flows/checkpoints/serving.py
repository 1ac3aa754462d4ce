"""A checkpoint or a base model as an OpenAI-compatible endpoint on loopback.

The libraries that serve are imported after the checks: a refusal should not wait for them.
"""

import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from ratchet.adapters.calls import Policy
from ratchet.adapters.tinker.engines import damaged_weights, needs_engine
from ratchet.flows.checkpoints.binding import BoundCheckpoint, bind_checkpoints, carry_weights
from ratchet.flows.checkpoints.names import Weights, split_name
from ratchet.flows.recipe.loading import read_lineage, read_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.settings.run import Model, ServicePatience
from ratchet.tasks.spending.work_log import WorkLog
from ratchet.tasks.storage.manifest import REPLAY, bind_run, parent_of
from ratchet.tasks.storage.run_folder import RunFolder, folder_of

if TYPE_CHECKING:
    from ratchet.adapters.door.door import OpenDoor
    from ratchet.adapters.tinker.service import PatientSampler, Service
    from ratchet.tasks.updates import PolicyUpdater

log = logging.getLogger(__name__)

SERVED_LOOK_SECONDS = 0.5


@contextmanager
def serve_model(weights: Weights, port: int = 0) -> Iterator[tuple["OpenDoor", "Service"]]:
    """Yield the endpoint of weights, and the service that samples them."""
    from ratchet.adapters.door.door import OpenDoor
    from ratchet.adapters.rendering.chat import Chat

    with _merged(weights) as weights, open_weights(weights) as (service, sampler):
        model, tokenizer = weights.model, service.tokenizer_of(sampler)
        context = service.context(model.base)
        chat = Chat(tokenizer, model.renderer, context, model.thinking)
        policy, key = Policy(sampler, weights.name), secrets.token_urlsafe(32)
        with OpenDoor(chat, policy, weights.defaults, key, port) as door:
            yield door, service


@contextmanager
def open_weights(weights: Weights) -> Iterator[tuple["Service", "PatientSampler"]]:
    """Yield the service of weights, their run's if they have a run, and their sampler.

    If the service has lost a checkpoint, its weights are made again, and the run notes that.
    """
    base = weights.model.base
    if weights.run is None:
        with TemporaryDirectory() as state, connect_to(base, Path(state)) as service:
            yield service, service.base_sampler(base)
        return
    with open_checkpoints_of(weights.run, to_serve=True) as (service, updater_of):
        yield service, updater_of(weights.policy).sampler(weights.step)


@contextmanager
def open_checkpoints_of(
    run: RunFolder, *, to_serve: bool = False
) -> Iterator[tuple["Service", Callable[[str], "PolicyUpdater"]]]:
    """Open a run for its checkpoints; yield its service, and the updater of a policy by name."""
    from ratchet.flows.checkpoints.policies import policy_updater

    recipe, parent = read_recipe(run), parent_of(run)
    values, on_policy = recipe.model_dump(mode="json"), parent is None or parent["how"] != REPLAY
    mine = RunFolder.refuse_elsewhere
    with (
        bind_run(run.name, values, recipe.fingerprint(), None, mine, to_serve=to_serve) as folder,
        connect_to(recipe.model.base, folder.engine, recipe.service.timeout_seconds) as service,
    ):
        recipes = read_lineage(folder, recipe)
        yield (
            service,
            lambda policy: policy_updater(
                recipe, recipes, folder, service, policy, on_policy=on_policy
            ),
        )


def connect_to(
    base: str, state: Path, patience: float = ServicePatience().timeout_seconds, *log: WorkLog
) -> AbstractContextManager["Service"]:
    """Connect to the service of a base model, by a library that takes a second to import."""
    from ratchet.adapters.tinker.service import connect

    return connect(base, state, patience, *log)


def serve_until(closed: Event, service: "Service") -> None:
    """Wait until `closed` is set; EngineDied if the engine dies before."""
    while not closed.wait(SERVED_LOOK_SECONDS):
        service.check()


def stdin_closed() -> Event:
    """Return an event that is set when stdin ends, as when the parent process has died.

    At a terminal the event is never set, since a job in the background may not read there.
    """
    closed = Event()

    def read() -> None:
        for _ in sys.stdin:
            pass
        closed.set()

    if not sys.stdin.isatty():
        Thread(target=read, daemon=True).start()
    return closed


@contextmanager
def _merged(weights: Weights) -> Iterator[Weights]:
    """Yield weights that an engine loads: an exported adapter is merged into its base."""
    if weights.adapter is None:
        yield weights
        return
    from ratchet.adapters.tinker.engines import prepare_base
    from ratchet.adapters.weights.network import merge_folder

    base = prepare_base(weights.model.base)
    with TemporaryDirectory() as folder:
        merge_folder(base, weights.adapter, Path(folder))
        yield replace(weights, model=Model(base=folder), adapter=None)


def bind_new(recipe: RunRecipe) -> dict[str, Any]:
    """Describe the checkpoints to which a new run is bound, once damaged weights are made again."""
    bound = bind_checkpoints(recipe, {})
    described = {name: BoundCheckpoint.model_validate(one) for name, one in bound.items()}
    whole = not needs_engine(recipe.model.base) or not make_whole(described)
    return bound if whole else bind_checkpoints(recipe, {})


def make_whole(checkpoints: Mapping[str, BoundCheckpoint]) -> bool:
    """Have the runs of checkpoints make damaged weights again; return whether there were any.

    A checkpoint is rebuilt in its own run, whose engine writes the same bytes again.
    """
    damaged = [
        (name, policy)
        for name, bound in checkpoints.items()
        for policy, saved in bound.policies.items()
        for address in filter(None, (saved.sampler, saved.state))
        if damaged_weights(folder_of(bound.run).fetched(whole=True).engine, address)
    ]
    for name, policy in dict.fromkeys(damaged):
        _make_again(name, checkpoints[name], policy)
    return bool(damaged)


def _make_again(name: str, bound: BoundCheckpoint, policy: str) -> None:
    log.warning("the weights of %s are damaged, and are made again", name)
    _, only, _ = split_name(name)
    with_state = bound.policies[policy].state is not None
    with open_checkpoints_of(folder_of(bound.run)) as (_, updater_of):
        updater_of(only or policy).make_again(bound.step, with_state=with_state)


@contextmanager
def connect_run(recipe: RunRecipe, folder: RunFolder) -> Iterator["Service"]:
    """Yield the service of a run; its own engine has the weights to which the run is bound."""
    carry_weights(recipe, folder, make_whole)
    patience = recipe.service.timeout_seconds
    with connect_to(recipe.model.base, folder.engine, patience, WorkLog(folder)) as service:
        yield service
