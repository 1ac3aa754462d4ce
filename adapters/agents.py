"""An agent by its name: whatever it is written as, one coroutine from an example to a reward."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.errors import UserError

AGENTS = "agents"
PLAY = "play"

Example = dict[str, Any]


class AgentError(UserError):
    """No agent answers to the name."""


class RewardError(ValueError):
    """An agent returned something that is not a reward."""


@dataclass(frozen=True)
class Endpoint:
    """What an agent gets to know: where its model is, and how to ask for it."""

    base_url: str
    api_key: str
    model: str


Play = Callable[[Example, Endpoint], Coroutine[Any, Any, float]]


def load_agent(name: str) -> Play:
    """The agent called `name`: a module of `agents/`, or `package.module:function`.

    Its function takes the example, and base_url, api_key and model by keyword; a plain function
    runs in a thread. It returns the rollout's reward, and raises where the rollout has failed.
    """
    function = _function(name)
    is_async = inspect.iscoroutinefunction(function)

    async def play(example: Example, endpoint: Endpoint) -> float:
        arguments = vars(endpoint)
        if is_async:
            return _reward(await function(example, **arguments))
        return _reward(await asyncio.to_thread(function, example, **arguments))

    return play


def _function(name: str) -> Callable[..., Any]:
    path, _, attribute = name.partition(":")
    module_name = path if attribute else f"{AGENTS}.{path}"
    attribute = attribute or PLAY
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise  # the agent is there; something that it imports is not
        raise AgentError(f"no agent {name!r}; there are: {', '.join(_known())}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise AgentError(f"{module_name} has no function {attribute!r}; an agent needs one")
    return function


def _known() -> list[str]:
    folders = importlib.import_module(AGENTS).__path__
    return sorted(
        path.stem
        for folder in folders
        for path in Path(folder).glob("*.py")
        if not path.stem.startswith("_")
    )


def _reward(value: object) -> float:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise RewardError(f"the agent returned {value!r} as its reward; a finite number is needed")
