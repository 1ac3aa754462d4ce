"""A GEM environment as an agent: what it shows is asked, and what is answered is its action."""

import importlib
import inspect
import logging
import random
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from adapters.calls import POLICY
from adapters.harness.environments import NoEnvironment, identity_and_arguments

SEED = "seed"
"""The column of an example that says which game it is."""

SEEDS = 2**32
"""numpy's generator, which GEM seeds, takes seeds below it."""


def gem(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The agent that plays the GEM environment `name`: its id, and `?` before its arguments.

    In game:GuessTheNumber-v0-easy?max_turns=5 the arguments are those of its class, each as JSON or
    else as text. A rollout plays a new environment, made and reset with the example's `seed`, so
    that all rollouts of an example play the same game. Its rewards are one a call. A step runs in
    the event loop: others wait for it.
    """
    begin = game_of(name)
    tls = ssl.create_default_context()

    async def play(
        example: Mapping[str, Any], *, base_url: str, api_key: str, model: str
    ) -> dict[str, list[float]]:
        game = begin(_seed(example))
        http = DefaultAsyncHttpxClient(verify=tls)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
            while not game.over:
                answered = await client.chat.completions.create(model=model, messages=game.messages)
                game.step(answered.choices[0].message.content or "")
        return {POLICY: game.rewards}

    return play


def game_of(name: str) -> Callable[[int], "Game"]:
    """From a seed to a new game of that environment; NoEnvironment if there is none."""
    return partial(Game, _maker(name))


class Game:
    """One game: what was said so far, what it earned, and the environment with its own luck.

    GEM draws from the generators of the whole process, and seeds them at `reset`: of two rollouts
    at the same time each would go on with what the other one seeded, and so would everybody else.
    """

    def __init__(self, make: Callable[[int], Any], seed: int) -> None:
        self.messages: list[Any] = []
        self.rewards: list[float] = []
        self.over = False
        self._luck = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._with_its_luck():
            self._environment = make(seed)
            shown, info = self._environment.reset(seed=seed)
        self._show(shown, info)

    def step(self, action: str) -> None:
        self.messages.append({"role": "assistant", "content": action})
        with self._with_its_luck():
            shown, reward, terminated, truncated, info = self._environment.step(action)
        self.rewards.append(float(reward))
        self.over = bool(terminated or truncated)
        self._show(shown, info)

    def _show(self, shown: str, info: Mapping[str, Any]) -> None:
        """Some environments say apart from what they show what is wanted next."""
        parts = (info.get("prefix"), shown, info.get("suffix"))
        text = "\n".join(part.strip("\n") for part in parts if part)
        self.messages.append({"role": "user", "content": text})

    @contextmanager
    def _with_its_luck(self) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        random.setstate(self._luck[0])
        np.random.set_state(self._luck[1])
        try:
            yield
        finally:
            self._luck = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


def _seed(example: Mapping[str, Any]) -> int:
    seed = example.get(SEED)
    if isinstance(seed, int) and 0 <= seed < SEEDS:
        return seed
    raise ValueError(
        f"the example's column {SEED!r} is {seed!r}; a GEM environment needs a whole number from 0 "
        f"to {SEEDS - 1}, since its game is made from it"
    )


def _maker(name: str) -> Callable[[int], Any]:
    """From a seed to a new environment."""
    identity, arguments = identity_and_arguments(name)
    registration = _registration(name)
    spec = registration.ENV_REGISTRY.get(identity)
    if spec is None:
        kind = identity.partition(":")[0]
        known = [known for known in registration.ENV_REGISTRY if known.startswith(kind)]
        raise NoEnvironment(
            f"GEM has no environment {identity!r}; it has: "
            f"{', '.join(known or registration.ENV_REGISTRY)}"
        )
    parameters = inspect.signature(_class(spec.entry_point)).parameters
    _check_arguments(identity, arguments, [*parameters, *spec.kwargs])
    # Those over a data set want their seed when they are made; most others ignore it.
    seeded = SEED in parameters

    def make(seed: int) -> Any:
        return registration.make(identity, **({SEED: seed} if seeded else {}) | arguments)

    return make


def _registration(name: str) -> Any:
    """GEM's registry. Importing GEM sets up the program's logging, which is undone."""
    handlers, level = [*logging.root.handlers], logging.root.level
    try:
        importlib.import_module("gem")
        importlib.import_module("gem.envs")  # it fills the registry
        return importlib.import_module("gem.envs.registration")
    except ModuleNotFoundError as error:
        if error.name != "gem":
            raise
        raise NoEnvironment(
            f"the agent 'gem:{name}' needs GEM, which is not installed: pip install gem-llm==0.1.0"
        ) from error
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def _class(entry_point: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(entry_point, str):
        return entry_point
    module, _, attribute = entry_point.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _check_arguments(identity: str, arguments: Mapping[str, Any], known: list[str]) -> None:
    """Most of GEM's classes take any argument, and ignore what they do not know."""
    for unknown in arguments.keys() - set(known):
        names = ", ".join(dict.fromkeys(name for name in known if name.strip("_")))
        raise NoEnvironment(
            f"GEM's environment {identity} has no argument {unknown!r}; it has: {names}"
        )
