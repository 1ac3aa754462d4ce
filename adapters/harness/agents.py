"""Agents by name: however one is written, it becomes a coroutine from an example to a reward."""

import asyncio
import importlib
import inspect
import locale
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import format_exception_only
from types import ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar

from ratchet.adapters.calls import Example
from ratchet.adapters.clients.current_rollout import Endpoint, Roles, rollout_context
from ratchet.adapters.clients.libraries import (
    keep_silent,
    lock_client_models,
    release_closed,
    share_contexts,
)
from ratchet.adapters.places.place import Place
from ratchet.adapters.process.event_loop import call_in_thread
from ratchet.adapters.process.program import project_files
from ratchet.adapters.project.modules import (
    AGENTS,
    PLAY,
    AgentError,
    load_agent_file,
    load_module,
    no_agent,
    source_of,
)
from ratchet.adapters.rewards import BETTER, Reward, read_reward, reward_verdict
from ratchet.durable.process import held_folders

ROLES_KEY = "roles"
PLACE_KEY = "place"

AGENT_KINDS = {
    "command": "ratchet.adapters.programs.commands",
    "forks": "ratchet.adapters.programs.forks",
    "gem": "ratchet.adapters.harness.environments",
    "judge": "ratchet.adapters.harness.judges",
    "resident": "ratchet.adapters.programs.residents",
    "verifiers": "ratchet.adapters.harness.environments",
}
"""The prefix of a name that is not a Python function's → the module whose function of the same name
makes the agent. The module is imported when it is needed: GEM's takes a second."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class AgentExit(RuntimeError):
    """An agent's attempt to end the process, which runs other rollouts too."""


class Play(Protocol):
    """Plays a rollout of an example, given the endpoint of each role and the rollout's place, if it
    has one, and returns its reward."""

    async def __call__(
        self, example: Example, endpoints: Roles, place: Place | None = None
    ) -> Reward: ...


def load_agent(name: str, roles: Collection[str] = (), *, placed: bool = False) -> Play:
    """Load the agent `name`: a file of `agents/`, `module:function`, or of `AGENT_KINDS`.

    Its function takes the example, and base_url, api_key and model of its own role by keyword,
    which is the first: `policy`, or a judge's. A function with a keyword parameter `roles` gets
    these three of every role, by role, and one with a keyword parameter `place` the working folder
    of its rollout's place. A function that is not async runs in a thread. It returns the rollout's
    reward, or a verdict (`reward_verdict`), and raises if the rollout has failed. `roles` are the
    recipe's other roles, and `placed` whether it gives each rollout a place; AgentError if the
    agent cannot know of them.
    """
    keep_silent()  # before the agent imports a framework that reads the settings
    lock_client_models()
    share_contexts()
    release_closed()
    function = _find_function(name)
    known = _parameters(name, function)
    if roles and ROLES_KEY not in known:
        raise AgentError(
            f"the recipe has the roles {', '.join(roles)}, and the agent {name} takes no roles; "
            f"give its function a keyword parameter {ROLES_KEY!r}, or leave the recipe's roles out"
        )
    if placed and PLACE_KEY not in known:
        raise AgentError(
            f"the recipe gives each rollout a place, and the agent {name} takes none; give its "
            f"function a keyword parameter {PLACE_KEY!r}, or leave the recipe's place out"
        )
    of_kind = name.partition(":")[0] in AGENT_KINDS

    async def play(example: Example, endpoints: Roles, place: Place | None = None) -> Reward:
        own = next(iter(endpoints.values()))
        given: dict[str, object] = {**own}
        if ROLES_KEY in known:
            given[ROLES_KEY] = endpoints
        if place is not None:
            example = place.given
            given[PLACE_KEY] = place if of_kind else place.work
        with rollout_context(endpoints), _process_kept():
            reward = read_reward(await contained(function, example, **given))
        return reward_verdict(reward, example) if BETTER in example else reward

    return play


def _parameters(name: str, function: Callable[..., object]) -> Collection[str]:
    """List a function's parameters; AgentError if it cannot be called as agents are."""
    endpoint = Endpoint(base_url="", api_key="", model="")
    try:
        signature = inspect.signature(function)
        further = {ROLES_KEY: {}, PLACE_KEY: None}
        knows = {name: value for name, value in further.items() if name in signature.parameters}
        signature.bind({}, **endpoint, **knows)
    except (TypeError, ValueError) as error:  # ValueError: some built-in functions have none
        raise AgentError(
            f"the agent {name} cannot be called as play(example, *, base_url, api_key, model): "
            f"{error}; give its function these parameters"
        ) from error
    return signature.parameters


async def contained(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call an agent's function, and keep its exit and its forked children from this process.

    SystemExit and its like would end the event loop with all its rollouts; they become AgentExit. A
    forked child, which would be a second copy of this process, ends here.
    """
    process, task = os.getpid(), asyncio.current_task()
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await in_thread(function, *args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if task is None or _is_ended(task, error):
            raise
        raise AgentExit(f"the agent raised {_said(error)}") from error
    finally:
        _end_child(process)


def _is_ended(task: asyncio.Task[Any], error: BaseException) -> bool:
    """Return whether a task is cancelled, or closed from outside, rather than its agent raises."""
    if isinstance(error, GeneratorExit):
        return asyncio.current_task(task.get_loop()) is not task
    return isinstance(error, asyncio.CancelledError) and task.cancelling() > 0


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


_locale = partial(locale.setlocale, locale.LC_ALL)
SHARED: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "working folder": (os.getcwd, os.chdir),
    "umask": (lambda: (umask := os.umask(0o077), os.umask(umask))[0], os.umask),
    "environment": (os.environ.copy, _set_environment),
    "socket timeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "locale": (_locale, _locale),
}
"""What all rollouts of this process share and an agent may change: how it is read, and set."""

CHANGED = (
    "an agent has changed the %s%.200s of this process, which all rollouts share; the next one "
    "finds it as before. What the agent's module sets when it is loaded stays, and a `command:` "
    "has a process of its own"
)
_told = set[str]()
_found: dict[str, Any] = {}
"""What the rollouts that are being played have found."""


@contextmanager
def _process_kept() -> Iterator[None]:
    """Leave the process as the agents' modules have left it, whatever a rollout does to it."""
    if not held_folders:
        _found.update({name: read() for name, (read, _) in SHARED.items()})
    held_folders.append(Path(_found["working folder"]))
    try:
        yield
    finally:
        held_folders.pop()
        for name, (read, write) in SHARED.items():
            found, left = _found[name], None
            with suppress(FileNotFoundError):  # the folder in which an agent was is gone
                left = read()
            if left != found:
                write(found)
                if name not in _told:
                    _told.add(name)
                    own = left.items() ^ found.items() if isinstance(left, dict) else ()
                    log.warning(CHANGED, name, "".join(sorted({f" {one}" for one, _ in own})))


def _said(error: BaseException) -> str:
    """Write an error as the last line of its trace does."""
    return format_exception_only(error)[-1].strip()


def contained_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Create a task whose exit does not end the event loop: the task factory of agents' loops."""

    async def contained() -> object:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise AgentExit(f"the agent raised {_said(error)}") from error

    task = asyncio.Task(contained(), loop=loop, **options)
    task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it never ran
    return task


def _end_child(process: int) -> None:
    """End this process if it is a child of `process`."""
    if os.getpid() != process:
        os._exit(1)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that is not async in a thread, and end a child that it forks."""
    process = os.getpid()

    def run() -> T:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:  # which no future of asyncio takes
            raise RuntimeError(f"the agent raised {_said(error)}") from error
        finally:
            _end_child(process)

    return await asyncio.wrap_future(call_in_thread("agent", run))


def _find_function(name: str) -> Callable[..., object]:
    path, _, attribute = name.partition(":")
    if path in AGENT_KINDS and path != name:
        return getattr(importlib.import_module(AGENT_KINDS[path]), path)(attribute)
    module = _load(name)
    attribute = attribute or PLAY
    function = getattr(module, attribute, None)
    if not callable(function):
        raise AgentError(f"{module.__file__} has no function {attribute!r}; an agent needs one")
    return function


def _load(name: str) -> ModuleType:
    path, _, attribute = name.partition(":")
    module = load_module(path) if attribute else load_agent_file(path)
    if module is None:
        raise no_agent(name)
    return module


def files_of(name: str) -> dict[str, list[Path]]:
    """Map what an agent's name says of the project's files to these.

    They are the files among a command's words, or the file that is named and, if it is the
    project's, the one that the function comes from.
    """
    kind, _, line = name.partition(":")
    if kind in AGENT_KINDS and line:
        return project_files(line)
    module, here = _load(name), Path.cwd()
    other = sys.modules.get(getattr(_find_function(name), "__module__", ""), module)
    files = {str(getattr(one, "__file__", None)): one for one in (other, module)}
    own = [Path(at) for at, one in files.items() if one is module or Path(at).is_relative_to(here)]
    for path in own:
        source_of(files[str(path)])  # refuses one that was edited since this process has read it
    return {name if line else str(AGENTS / f"{name}.py"): own}
