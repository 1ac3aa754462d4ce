"""A checkpoint or a base model as an OpenAI-compatible endpoint on loopback.

The libraries that serve are imported after the checks: a refusal should not wait for them.
"""

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import TYPE_CHECKING

from ratchet.adapters.calls import POLICY, Policy, Sampling
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.bases import check_base
from ratchet.adapters.tinker.engines import check_reachable, needs_engine
from ratchet.adapters.tinker.known_models import KNOWN
from ratchet.adapters.weights.adapter import is_adapter, is_model, read_base
from ratchet.flows.checkpoints.binding import CheckpointName
from ratchet.flows.recipe.loading import read_lineage, read_recipe
from ratchet.flows.recipe.run_recipe import MOST_TOKENS
from ratchet.tasks.settings.rollouts import Rollouts
from ratchet.tasks.settings.run import Model, ServicePatience
from ratchet.tasks.storage.files import is_full
from ratchet.tasks.storage.manifest import REPLAY, bind_run, parent_of
from ratchet.tasks.storage.run_folder import RunFolder, folder_of

if TYPE_CHECKING:
    from ratchet.adapters.door.serving import OpenDoor
    from ratchet.adapters.tinker.service import PatientSampler, Service
    from ratchet.tasks.updates import PolicyUpdater

SERVED_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Weights:
    """Weights to serve: a base model's or, with a `run`, a checkpoint's."""

    name: str
    model: Model
    defaults: Sampling
    """Sampling for clients that name no numbers."""
    run: RunFolder | None = None
    policy: str = POLICY
    step: int = 0
    adapter: Path | None = None
    """Folder of an exported adapter on the base."""


def find_weights(name: str) -> Weights:
    """Find RUN, RUN@STEP, RUN:POLICY@STEP, an exported folder, or a base model.

    A base model's name has a slash or is known. A run hides a folder of its name.

    STEP may be `best`. UserError if the name means no weights.
    """
    check_reachable()
    place, defaults = Path(name), Rollouts(max_tokens=MOST_TOKENS).sampling()
    if is_adapter(place) and not _names_run(name):
        base = read_base(place)
        if not needs_engine(base):
            raise UserError(
                f"{name} is an adapter, which an engine of this machine alone serves; unset "
                "TINKER_BASE_URL and TINKER_API_KEY"
            )
        check_base(base)
        return Weights(name, Model(base=base), defaults, adapter=place)
    if "/" in name or name in KNOWN or (is_model(place) and not _names_run(name)):
        base = str(place.resolve()) if is_model(place) else name
        check_base(base)
        return Weights(name, Model(base=base), defaults)
    named = CheckpointName.parse(name)
    folder = named.folder
    recipe = read_recipe(folder)
    named.check_policy(recipe.policies())
    step = named.saved_step
    name = f"{named.title}@{step}"
    return Weights(name, recipe.model, recipe.sampling(), folder, named.policy or POLICY, step)


@contextmanager
def serve_model(weights: Weights, port: int = 0) -> Iterator[tuple["OpenDoor", "Service"]]:
    """Yield the endpoint of weights, and the service that samples them."""
    from ratchet.adapters.door.serving import OpenDoor
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
    from ratchet.adapters.tinker.service import connect

    base = weights.model.base
    if weights.run is None:
        with (
            TemporaryDirectory() as state,
            connect(base, Path(state), ServicePatience().timeout_seconds) as service,
        ):
            yield service, service.base_sampler(base)
        return
    with open_checkpoints_of(weights.run, to_serve=True) as (service, updater_of):
        yield service, updater_of(weights.policy).sampler(weights.step)


@contextmanager
def open_checkpoints_of(
    run: RunFolder, *, to_serve: bool = False
) -> Iterator[tuple["Service", Callable[[str], "PolicyUpdater"]]]:
    """Open a run for its checkpoints; yield its service, and the updater of a policy by name."""
    from ratchet.adapters.tinker.service import connect
    from ratchet.flows.checkpoints.policies import policy_updater

    recipe, parent = read_recipe(run), parent_of(run)
    values, on_policy = recipe.model_dump(mode="json"), parent is None or parent["how"] != REPLAY
    with (
        bind_run(run.name, values, recipe.fingerprint(), to_serve=to_serve) as folder,
        connect(recipe.model.base, folder.engine, recipe.service.timeout_seconds) as service,
    ):
        recipes = read_lineage(folder, recipe)
        yield (
            service,
            lambda policy: policy_updater(
                recipe, recipes, folder, service, policy, on_policy=on_policy
            ),
        )


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


def _names_run(name: str) -> bool:
    return "/" not in name and folder_of(name).exists()


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
        try:
            merge_folder(base, weights.adapter, Path(folder))
        except OSError as error:
            if not is_full(error):
                raise
            raise UserError(
                f"{weights.name} and its base, which are merged to be served, do not fit into "
                f"{folder} ({error}); make space, or give another TMPDIR"
            ) from error
        yield replace(weights, model=Model(base=folder), adapter=None)
