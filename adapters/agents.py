"""An agent by its name: whatever it is written as, one coroutine from an example to a reward."""

import asyncio
import contextvars
import importlib
import inspect
import math
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from adapters.errors import UserError

AGENTS = "agents"
PLAY = "play"

Example = dict[str, Any]


class AgentError(UserError):
    """No agent answers to the name."""


class RewardError(ValueError):
    """An agent returned something that is not a reward."""


class AgentExit(RuntimeError):
    """An agent wanted to end the program, which runs other rollouts too."""


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
    call = function if inspect.iscoroutinefunction(function) else partial(_in_thread, function)

    async def play(example: Example, endpoint: Endpoint) -> float:
        return _reward(await _contained(call, example, **vars(endpoint)))

    return play


async def _contained(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the agent returns or raises; but neither its exit nor its forked child is ours.

    SystemExit and its like would end the event loop with all its rollouts. A child that comes back
    from the agent's code would go on as a second copy of us, so it ends here.
    """
    process = os.getpid()
    try:
        return await call(*args, **kwargs)
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise AgentExit(f"the agent raised {error!r}") from error
    finally:
        _end_child(process)


def contained_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory for the loop of agents: an agent's own tasks cannot end the loop either."""

    async def contained() -> Any:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise AgentExit(f"the agent raised {error!r}") from error

    return asyncio.Task(contained(), loop=loop, **options)


def _end_child(process: int) -> None:
    """Leave, if this is not `process`."""
    if os.getpid() != process:
        os._exit(1)


async def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a plain function in a thread of its own.

    One that never returns costs that thread: nobody waits for it, neither the next rollout (as in a
    pool) nor the end of the process.
    """
    returned: Future[Any] = Future()
    returned.set_running_or_notify_cancel()
    process, context = os.getpid(), contextvars.copy_context()

    def run() -> None:
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  It is raised where the agent is awaited.
            _end_child(process)
            returned.set_exception(error)
        else:
            _end_child(process)
            returned.set_result(value)

    Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(returned)


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
