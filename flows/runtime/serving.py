"""A checkpoint or a base model as an OpenAI-compatible endpoint on loopback."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from adapters.calls import POLICY, Policy, Sampling
from adapters.chat import Chat
from adapters.door.serving import OpenDoor
from adapters.tinker.service import PatientSampler, Service, connect
from flows.recipe import Model, Recipe
from flows.runtime.eval_targets import ContenderError, named_checkpoint
from tasks.checkpoints import Ledger
from tasks.storage.run_folder import folder_of, opened_run, policy_folder, recipe_of

LOOK_SECONDS = 0.5
MOST_TOKENS = 512
"""Where a client names no limit to a base model."""


@dataclass(frozen=True)
class Weights:
    """What is served, by what name, and how it is sampled where a client does not say."""

    name: str
    service: Service
    sampler: PatientSampler
    model: Model
    defaults: Sampling


@dataclass(frozen=True)
class Served:
    """An endpoint that answers."""

    base_url: str
    api_key: str
    model: str
    service: Service

    def exports(self) -> dict[str, str]:
        """The variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }

    def until(self, closed: Event) -> None:
        """Return when that is set; EngineDied if the engine of this machine dies before."""
        while not closed.wait(LOOK_SECONDS):
            self.service.check()


@contextmanager
def serving(name: str, port: int = 0) -> Iterator[Served]:
    """Serve RUN, RUN@STEP, RUN:POLICY@STEP or, as its id has a slash, a base model."""
    weights = _of_base(name) if "/" in name else _of_run(*named_checkpoint(name))
    with weights as found:
        base, service = found.model.base, found.service
        tokenizer = service.tokenizer_of(found.sampler)
        chat = Chat(tokenizer, found.model.renderer, service.context(base))
        key = secrets.token_urlsafe(32)
        policy = Policy(found.sampler, found.name)
        with OpenDoor(chat, key, policy, found.name, found.defaults, port) as door:
            yield Served(door.base_url, key, found.name, service)


def stdin_closed() -> Event:
    """Set when stdin ends, as it does when the program that started us has died.

    In a terminal never: a job in the background may not read there.
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
def _of_run(name: str, step: int | None) -> Iterator[Weights]:
    run, _, policy = name.partition(":")
    recipe = Recipe.model_validate(recipe_of(folder_of(run)))
    rollouts, policy = recipe.rollouts, policy or POLICY
    if policy not in recipe.policies():
        there = ", ".join(recipe.policies())
        raise ContenderError(f"{run} trains no policy {policy!r}; there is: {there}")
    defaults = Sampling(rollouts.max_tokens, rollouts.temperature, top_p=1.0, top_k=-1)
    with (
        opened_run(run, recipe.model_dump(mode="json"), recipe.fingerprint()) as folder,
        connect(recipe.model.base, folder / "engine", recipe.service.timeout_seconds) as service,
    ):
        ledger = Ledger(policy_folder(folder, policy) / "checkpoints.jsonl")
        checkpoint = ledger.at(ledger.last_step() if step is None else step)
        sampler = service.sampler(checkpoint.sampler)
        yield Weights(f"{name}@{checkpoint.step}", service, sampler, recipe.model, defaults)


@contextmanager
def _of_base(base: str) -> Iterator[Weights]:
    defaults = Sampling(MOST_TOKENS, temperature=1.0, top_p=1.0, top_k=-1)
    with TemporaryDirectory() as state, connect(base, Path(state)) as service:
        yield Weights(base, service, service.base_sampler(base), Model(base=base), defaults)
