"""Agents that play environments of GEM and of the verifiers package.

Of a GEM environment the observations are messages, and the answers are actions. verifiers 0.1.14
runs in a Python of its own: it needs Hugging Face's datasets below 4.7, which want huggingface-hub
below 2 and an older fsspec than ours. Names of environments are such as
game:Hangman-v0-easy?hardcore=true.
"""

import importlib
import inspect
import json
import logging
import os
import random
import shlex
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Protocol
from urllib.parse import parse_qsl

import numpy as np
from openai import AsyncOpenAI

from ratchet.adapters.calls import POLICY, Example, JsonObject
from ratchet.adapters.errors import UserError, did_you_mean
from ratchet.adapters.programs.residents import resident

SEED = "seed"
"""The column of an example that determines the game."""

SEEDS = 2**32
"""The first number that is too large as a seed of numpy's generator, which GEM seeds."""

WRAPPERS = "wrappers"
TEMPLATE_ARGUMENT = "template"
"""Arguments of a name that are of the agent, not of the environment's class."""

ANSWERING = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
TEMPLATES = {
    "game": "You are playing language games. Make valid actions to win.\nObservation: {}"
    + ANSWERING,
    "general": "Question: {}" + ANSWERING,
}
"""Texts around an observation, as GEM's examples have them for Qwen3."""


def split_name(name: str) -> tuple[str, JsonObject]:
    """Split a name at its question mark into the id and the arguments: each value JSON or text."""
    identity, _, query = name.partition("?")
    arguments: JsonObject = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        arguments[key] = text
        with suppress(ValueError):
            arguments[key] = json.loads(text)
    return identity, arguments


def gem(name: str) -> Callable[..., Coroutine[None, None, dict[str, list[float]]]]:
    """Return the agent that plays the GEM environment `name`: its id, and `?` before arguments.

    In game:GuessTheNumber-v0-easy?max_turns=5 the class of the game gets max_turns=5. Each argument
    is JSON or text. Two are of the agent: `template` puts one of TEMPLATES around each observation,
    and `wrappers` are GEM's, such as concat, which shows the game so far in each observation: then
    each call has one message.

    A rollout plays a new environment, made and reset with the example's `seed`, so that all
    rollouts of an example play the same game. Each call earns the reward of its step. A step runs
    in the event loop and delays other rollouts.
    """
    begin = game_of(name)

    async def play(
        example: Example, *, base_url: str, api_key: str, model: str
    ) -> dict[str, list[float]]:
        game = begin(_read_seed(example))
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            while not game.over:
                answered = await client.chat.completions.create(
                    model=model,
                    messages=game.messages,  # pyright: ignore[reportArgumentType]
                )
                game.step(answered.choices[0].message.content or "")
        return {POLICY: game.rewards}

    return play


class GemEnvironment(Protocol):
    def reset(self, *, seed: int) -> tuple[str, Mapping[str, str | None]]: ...

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, str | None]]: ...


class Game:
    """One game: its messages and rewards so far, its environment and its random generators.

    `make` makes the environment from the seed. `wrapped` is whether an observation holds the whole
    game so far; `template` is the text around it.

    GEM draws from the generators of the whole process, and seeds them at `reset`. Without
    generators of its own, a game would draw from a generator that another game seeded.
    """

    def __init__(
        self, make: Callable[[int], GemEnvironment], template: str, wrapped: bool, seed: int
    ) -> None:
        self._template = template
        self._wrapped = wrapped
        self.messages: list[dict[str, str]] = []
        self.rewards: list[float] = []
        self.over = False
        self._generators = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._own_generators():
            self._environment = make(seed)
            shown, info = self._environment.reset(seed=seed)
        self._observe(shown, info)

    def step(self, action: str) -> None:
        self.messages.append({"role": "assistant", "content": action})
        with self._own_generators():
            shown, reward, terminated, truncated, info = self._environment.step(action)
        self.rewards.append(reward)
        self.over = bool(terminated or truncated)
        self._observe(shown, info)

    def _observe(self, shown: str, info: Mapping[str, str | None]) -> None:
        """Add an observation; some environments have the next question beside it."""
        if self._wrapped:
            self.messages.clear()
            text = shown
        else:
            parts = (info.get("prefix"), shown, info.get("suffix"))
            text = "\n".join(part.strip("\n") for part in parts if part)
        self.messages.append({"role": "user", "content": self._template.format(text)})

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            yield
        finally:
            self._generators = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


def _read_seed(example: Example) -> int:
    seed = example.get(SEED)
    if type(seed) is int and 0 <= seed < SEEDS:
        return seed
    raise ValueError(
        f"the example's column {SEED!r} is {seed!r}; a GEM environment needs a whole number from 0 "
        f"to {SEEDS - 1}, since its game is made from it"
    )


def game_of(name: str) -> Callable[[int], Game]:
    """Return what makes a new game from a seed; UserError if GEM has no game of this name."""
    identity, arguments = split_name(name)
    wrappers, template = arguments.pop(WRAPPERS, None), arguments.pop(TEMPLATE_ARGUMENT, None)
    if template is not None and str(template) not in TEMPLATES:
        raise UserError(
            f"the template {str(template)!r} is not known; give one of: {', '.join(TEMPLATES)}"
        )
    registration = _import_registration(name)
    spec = registration.ENV_REGISTRY.get(identity)
    if spec is None:
        kind = identity.partition(":")[0]
        known = [known for known in registration.ENV_REGISTRY if known.startswith(kind)]
        raise UserError(
            f"GEM has no environment {identity!r}; it has: "
            f"{', '.join(known or registration.ENV_REGISTRY)}{did_you_mean(identity, known)}"
        )
    entry = spec.entry_point
    environment = resolve_name(entry) if isinstance(entry, str) else entry
    parameters = inspect.signature(environment).parameters
    known = [*parameters, *spec.kwargs]
    for unknown in arguments.keys() - {*known}:  # most of GEM's classes take any, and ignore them
        names = ", ".join(dict.fromkeys(name for name in known if name.strip("_")))
        raise UserError(
            f"GEM's environment {identity} has no argument {unknown!r}; it has: {names}"
        )
    # Environments over a data set need their seed when they are made; most others ignore it.
    seeded, wrap = SEED in parameters, _load_wrappers(wrappers)

    def make(seed: int) -> GemEnvironment:
        environment = registration.make(identity, **({SEED: seed} if seeded else {}) | arguments)
        return reduce(lambda wrapped, wrap: wrap(wrapped), wrap, environment)

    return partial(Game, make, TEMPLATES.get(str(template), "{}"), "concat" in str(wrappers))


def _load_wrappers(names: object) -> list[Callable[[GemEnvironment], GemEnvironment]]:
    """Return GEM's wrappers by their names, separated by commas, in GEM's order.

    UserError for a wrapper that writes a chat template, since a recipe's renderer does that.
    """
    if names is None:
        return []
    known = importlib.import_module("gem.wrappers.wrapper_factory").WRAPPER_FACTORY
    for name in str(names).split(","):
        if name not in known or "chat" in name:
            plain = ", ".join(one for one in known if "chat" not in one)
            raise UserError(
                f"the wrapper {name!r} is not one that a chat can have; give of: {plain}"
            )
    return [known[name] for name in known if name in str(names).split(",")]


def _import_registration(name: str) -> ModuleType:
    """Import the module of GEM's registry, and undo the import's changes to logging."""
    handlers, level = [*logging.root.handlers], logging.root.level
    try:
        importlib.import_module("gem")
        importlib.import_module("gem.envs")  # it fills the registry
        return importlib.import_module("gem.envs.registration")
    except ModuleNotFoundError as error:
        if error.name != "gem":
            raise
        raise UserError(
            f"the agent 'gem:{name}' needs GEM, which is not installed: pip install gem-llm==0.1.0"
        ) from error
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


PYTHON = "VERIFIERS_PYTHON"
"""The environment variable that names a Python that has verifiers."""

VERIFIERS_PROGRAM = Path(__file__).with_name("verifiers_program.py")


def verifiers(name: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent of the verifiers environment `name`: its id, and `?` before arguments.

    The arguments are for `load_environment` of its module, each as JSON or as text.
    `verifiers_program.py` says which row of the environment's data sets is played.
    """
    python = os.environ.get(PYTHON, ".venv-verifiers/bin/python")
    if not Path(python).exists():
        raise UserError(
            f"the agent 'verifiers:{name}' needs verifiers, and there is no {python}; run "
            f"`make verifiers`, or set {PYTHON} to a Python that has it"
        )
    identity, arguments = split_name(name)
    # -P keeps the program's own folder, whose modules have packages' names, off the path.
    return resident(
        shlex.join([python, "-P", str(VERIFIERS_PROGRAM), identity, json.dumps(arguments)])
    )
