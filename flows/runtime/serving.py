"""A checkpoint or a base model as an OpenAI-compatible endpoint on loopback."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from adapters.calls import Policy, Sampling
from adapters.door.serving import OpenDoor, ServedModel
from adapters.rendering.chat import Chat
from adapters.tinker.service import PatientSampler, Service, connect
from flows.recipe.run_recipe import Model
from flows.runtime.checks import ServedCheckpoint, find_served
from tasks.storage.manifest import bind_run

LOOK_SECONDS = 0.5
MOST_TOKENS = 512
"""Limit of a base model's answers for clients that name none."""


@dataclass(frozen=True)
class Weights:
    """Weights to serve: their name, and the sampling of clients that name none."""

    name: str
    service: Service
    sampler: PatientSampler
    model: Model
    defaults: Sampling


@dataclass(frozen=True)
class Served:
    """An endpoint while it answers."""

    base_url: str
    api_key: str
    model: str
    service: Service

    def exports(self) -> dict[str, str]:
        """Return the environment variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }

    def until(self, closed: Event) -> None:
        """Wait until `closed` is set; EngineDied if the engine dies before."""
        while not closed.wait(LOOK_SECONDS):
            self.service.check()


@contextmanager
def serve_model(name: str, port: int = 0) -> Iterator[Served]:
    """Serve RUN, RUN@STEP, RUN:POLICY@STEP or, if the name has a slash, a base model."""
    served = find_served(name)
    weights = _of_base(name) if served is None else _of_run(served)
    with weights as found:
        base, service = found.model.base, found.service
        tokenizer = service.tokenizer_of(found.sampler)
        chat = Chat(tokenizer, found.model.renderer, service.context(base))
        key = secrets.token_urlsafe(32)
        model = ServedModel(found.name, Policy(found.sampler, found.name), found.defaults)
        with OpenDoor(chat, model, key, port) as door:
            yield Served(door.base_url, key, found.name, service)


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
def _of_run(served: ServedCheckpoint) -> Iterator[Weights]:
    recipe, rollouts = served.recipe, served.recipe.rollouts
    defaults = Sampling(rollouts.max_tokens, rollouts.temperature, top_p=1.0, top_k=-1)
    with (
        bind_run(served.run, recipe.model_dump(mode="json"), recipe.fingerprint()) as folder,
        connect(recipe.model.base, folder.engine, recipe.service.timeout_seconds) as service,
    ):
        sampler = service.sampler(served.checkpoint.sampler)
        yield Weights(served.name, service, sampler, recipe.model, defaults)


@contextmanager
def _of_base(base: str) -> Iterator[Weights]:
    defaults = Sampling(MOST_TOKENS, temperature=1.0, top_p=1.0, top_k=-1)
    with TemporaryDirectory() as state, connect(base, Path(state)) as service:
        yield Weights(base, service, service.base_sampler(base), Model(base=base), defaults)
