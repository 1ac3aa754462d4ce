"""An agent by its name: whatever it is written as, one coroutine from an example to a reward."""

import asyncio
import contextvars
import importlib
import inspect
import os
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from adapters.calls import POLICY, Example
from adapters.errors import UserError
from adapters.harness.current_rollout import rollout_context
from adapters.harness.rewards import Reward, read_reward
from adapters.silence import keep_silent

AGENTS = "agents"
PLAY = "play"
ROLES = "roles"

WAYS = {
    "command": "adapters.harness.commands",
    "gem": "adapters.harness.gem",
    "verifiers": "adapters.harness.verifiers",
}
"""What stands before the colon of a name that is no Python function's, and the module whose
function of that name makes the agent. It is imported when it is needed: GEM's takes a second."""


class AgentError(UserError):
    """No agent answers to the name."""


class AgentExit(RuntimeError):
    """An agent wanted to end the program, which runs other rollouts too."""


@dataclass(frozen=True)
class Endpoint:
    """What an agent gets to know of a role: where its model is, and how to ask for it."""

    base_url: str
    api_key: str
    model: str


Play = Callable[[Example, Mapping[str, Endpoint]], Coroutine[Any, Any, Reward]]
"""From an example, and the endpoint of each role, to the rollout's reward."""


def load_agent(name: str, roles: Collection[str] = ()) -> Play:
    """The agent called `name`: a module of `agents/`, `package.module:function`, or one of `WAYS`.

    Its function takes the example, and base_url, api_key and model of the role `policy` by keyword;
    one with a keyword parameter `roles` gets those of every role, by role. A plain function runs in
    a thread. It returns the rollout's reward, and raises where the rollout has failed. `roles` are
    those of the recipe beside the policy: an agent that could not know of them is refused.
    """
    keep_silent()  # before the agent imports what would speak
    function = _function(name)
    call = function if inspect.iscoroutinefunction(function) else partial(in_thread, function)
    knows_roles = ROLES in inspect.signature(function).parameters
    if roles and not knows_roles:
        raise AgentError(
            f"the recipe says who answers {', '.join(roles)}, and the agent {name} cannot know; "
            f"give its function a keyword parameter {ROLES!r}, or leave the recipe's roles out"
        )

    async def play(example: Example, endpoints: Mapping[str, Endpoint]) -> Reward:
        where = {role: asdict(endpoint) for role, endpoint in endpoints.items()}
        given = {**where[POLICY], **({ROLES: where} if knows_roles else {})}
        with rollout_context(where):
            return read_reward(await contained(call, example, **given))

    return play


async def contained(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    task = asyncio.Task(contained(), loop=loop, **options)
    task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it never ran
    return task


def _end_child(process: int) -> None:
    """Leave, if this is not `process`."""
    if os.getpid() != process:
        os._exit(1)


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
    if path in WAYS and path != name:
        return getattr(importlib.import_module(WAYS[path]), path)(attribute)
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


def imported(name: str) -> ModuleType | None:
    """The module, None if there is none; raises if it is there and something it imports is not."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        return None


def _known() -> list[str]:
    folders = importlib.import_module(AGENTS).__path__
    return sorted(
        path.stem
        for folder in folders
        for path in Path(folder).glob("*.py")
        if f"def {PLAY}(" in path.read_text(encoding="utf-8")
    )
