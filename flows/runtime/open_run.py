"""An open run: its folder, the service, the policies, and the server of its rollouts."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from prefect.runtime import flow_run
from tenacity import RetryCallState, retry, retry_if_exception_type, stop_after_attempt

from adapters.addresses import Listener
from adapters.calls import Sampling
from adapters.chat import Chat
from adapters.door.backends import create_backends
from adapters.door.door import Door
from adapters.errors import EngineDied
from adapters.player_protocol import PlaySettings
from adapters.tinker.service import Service, connect
from adapters.tracking import Tracker
from flows.recipe.recipe import Recipe
from flows.recipe.rollouts import Rollouts
from flows.runtime.checks import check_start, train_split
from flows.runtime.policies import RunPolicies, open_policies
from flows.runtime.references import (
    SavedReference,
    bind_reference,
    open_reference,
)
from tasks.checkpoints import Ledger
from tasks.examples.reading import Source
from tasks.metrics import read_metrics
from tasks.references import Reference
from tasks.rollouts import RolloutServer
from tasks.storage.manifest import bind_run, lineage
from tasks.storage.run_folder import RunFolder, folder_of, name_run, shard_name

log = logging.getLogger(__name__)


STARTS = 3
"""Starts of a run in one process, if its engine dies each time."""


def _log_death(ended: RetryCallState) -> None:
    assert ended.outcome is not None
    start, why = ended.attempt_number + 1, ended.outcome.exception()
    log.warning("the run is started again (start %d of %d), since %s", start, STARTS, why)


again_if_engine_dies = retry(
    retry=retry_if_exception_type(EngineDied),
    stop=stop_after_attempt(STARTS),
    before_sleep=_log_death,
    reraise=True,
)
"""Decorator of a flow's function, which goes on from the run's files if the engine dies.

Prefect would retry a flow after any error, also after a mistake of the user.
"""


@dataclass(frozen=True)
class OpenRun:
    """A run while a flow has it open."""

    folder: RunFolder
    policies: RunPolicies
    rollouts: RolloutServer
    tracker: Tracker
    steps: int
    reference: Reference | None
    """Policy from which the penalty measures the divergence, if the recipe has a penalty."""

    @property
    def ledger(self) -> Ledger:
        """Checkpoints of the main policy; every policy has the same steps."""
        return self.policies.main.ledger

    def steps_left(self) -> range:
        """Return the steps that are not done; a step is done when its metrics are recorded."""
        return range(len(read_metrics(self.folder.metrics)), self.steps)


@contextmanager
def open_run(recipe: Recipe, name: str, *, on_policy: bool = True) -> Iterator[OpenRun]:
    """Open a run, new or not. Mistakes of the user are refused before anything starts, and a new
    run that cannot be opened is deleted.

    Rebuilt weights must give the recorded log-probabilities if the run is `on_policy`: if they
    are the weights that sampled.
    """
    saved = check_start(recipe, folder_of(name))
    backends = create_backends(recipe.roles, recipe.seed)
    values, rollouts = recipe.model_dump(mode="json"), recipe.rollouts
    with (
        _delete_unless_opened(folder_of(name)) as opened,
        bind_run(name, values, recipe.fingerprint()) as folder,
        _connect(recipe, folder, saved) as service,
    ):
        *ancestors, (first, _) = lineage(folder)
        recipes = [(step, Recipe.model_validate(made)) for step, made in ancestors]
        recipes.append((first, recipe))
        policies = open_policies(recipe, recipes, folder, service, on_policy=on_policy)
        tokenizer = service.tokenizer(policies.main.ledger.at(0).sampler, recipe.model.base)
        chat = Chat(tokenizer, recipe.model.renderer, service.context(recipe.model.base))
        with (
            Door(chat, backends, recipe.seed, rollouts.max_calls, door_listener(rollouts)) as door,
            Tracker(recipe.tracking.project, name, values, folder.tracking) as tracker,
        ):
            settings = PlaySettings(
                recipe.agent,
                list(door.roles),
                rollouts.concurrency_of_batch(),
                rollouts.timeout_seconds,
            )
            server = RolloutServer(folder, door, service, settings, rollouts.replay)
            reference = open_reference(recipe, folder, service, tokenizer)
            opened.set()
            yield OpenRun(folder, policies, server, tracker, recipe.steps, reference)


@contextmanager
def _delete_unless_opened(run: RunFolder) -> Iterator[Event]:
    """Yield an event; a run that is new is deleted if the event is not set at the end."""
    new, opened = not run.exists(), Event()
    try:
        yield opened
    finally:
        if new and not opened.is_set() and run.exists():
            run.delete()


@contextmanager
def _connect(
    recipe: Recipe, folder: RunFolder, reference: SavedReference | None
) -> Iterator[Service]:
    """Yield the service of a run; an engine of the run's own has the reference."""
    if reference is not None:
        bind_reference(folder, reference, recipe.model.base)
    with connect(recipe.model.base, folder.engine, recipe.service.timeout_seconds) as service:
        yield service


def door_listener(rollouts: Rollouts) -> Listener:
    """Return where the door listens: on loopback, or where the cluster's workers reach it."""
    if rollouts.door is None:
        return Listener()
    from adapters.harness.dask_cluster import listener_at  # Dask is an extra

    return listener_at(rollouts.door)


def name_of_run() -> str:
    """Name the run of the current flow run: its parameter `run`, or its agent and its own id."""
    parameters = flow_run.parameters
    return parameters.get("run") or name_run(parameters["recipe"].agent, str(flow_run.id)[:8])


def train_split_at(recipe: Recipe, run: RunFolder, step: int) -> Source:
    """Return the examples that are trained on, with what the shard of a step may depend on.

    The shard is drawn when the steps before `step` - lag are done. Later ones may be done as well
    or not, so their rewards are left out, and so are those of an ancestor's other examples.
    """
    source = train_split(recipe)
    if source.curriculum.order != "pass_rate":
        return source
    first = first_step_of_examples(lineage(run))
    done = max(step - recipe.rollouts.lag, first)
    drawn = (run.shard(shard_name("train", earlier)) for earlier in range(done, step))
    measured = run.sealed_steps(range(first, done))
    curriculum = replace(source.curriculum, measured=tuple(measured), under_way=tuple(drawn))
    return replace(source, curriculum=curriculum)


def first_step_of_examples(eras: Sequence[tuple[int, Mapping[str, Any]]]) -> int:
    """Return the first step since which a run's agent has been asked the examples of one dataset.

    `eras` is the run's lineage.
    """
    asked = [(step, recipe["agent"], recipe["dataset"]["path"]) for step, recipe in eras]
    others = [place for place, era in enumerate(asked) if era[1:] != asked[-1][1:]]
    return asked[others[-1] + 1][0] if others else 0


def training_sampling(recipe: Recipe) -> Sampling:
    """Return the sampling of training and of sampled evaluations: the whole distribution."""
    rollouts = recipe.rollouts
    return Sampling(rollouts.max_tokens, rollouts.temperature, top_p=1.0, top_k=-1)


def greedy_sampling(recipe: Recipe) -> Sampling:
    """Return the sampling that always takes the likeliest token."""
    return Sampling(recipe.rollouts.max_tokens, temperature=0.0, top_p=1.0, top_k=-1)
