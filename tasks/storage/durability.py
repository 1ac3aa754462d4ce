"""A durable task is done when its file is there: in this flow run, in its retry, or in another one.

Prefect's own results would be a second truth, and its result files are not written atomically, so
none are kept: a task whose file exists ends at once in the state *Cached*. A retry is safe for the
same reason, and goes on where the failed try stopped.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from adapters.tinker.faults import is_passing
from tasks.storage.files import is_full
from tasks.storage.run_folder import POLICIES

RETRY_DELAYS = [2.0, 10.0, 30.0]

P = ParamSpec("P")
Stage = Callable[Concatenate[Path, P], None]
Call = Callable[Concatenate[Path, P], Path]


def durable(place: str, name: str) -> Callable[[Stage[P]], Call[P]]:
    """Make of a function that writes the file `path` a Prefect task, called with a run's folder.

    `place` is where in the folder the file lies, and `name` how the task run is called; both are
    filled with the call's arguments. The function writes the file whole (`tasks.storage.files.appearing`),
    so one that is interrupted leaves nothing, and is run again.
    """

    def decorate(write: Stage[P]) -> Call[P]:
        signature = inspect.signature(write)

        def file_in(folder: Path, *args: P.args, **kwargs: P.kwargs) -> Path:
            arguments = signature.bind(folder, *args, **kwargs).arguments
            return folder / place.format(**arguments)

        @task(
            name=write.__name__,
            task_run_name=_named(name),
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(RETRY_DELAYS),
            retry_delay_seconds=RETRY_DELAYS,
            retry_condition_fn=_may_pass,
        )
        @wraps(write)
        def stage(path: Path, *args: P.args, **kwargs: P.kwargs) -> State | None:
            if path.exists():
                return Completed(name="Cached", message=f"{path} is there")
            write(path, *args, **kwargs)
            return None

        @wraps(write)
        def call(folder: Path, *args: P.args, **kwargs: P.kwargs) -> Path:
            path = file_in(folder, *args, **kwargs)
            stage(path, *args, **kwargs)
            return path

        return call

    return decorate


def _named(name: str) -> Callable[..., str]:
    """The task run's name; where the file is of another policy than the main one, of whom."""

    def named(parameters: dict[str, Any]) -> str:
        home: Path = parameters["path"].parents[1]
        of = f" of {home.name}" if home.parent.name == POLICIES else ""
        return name.format(**parameters) + of

    return named


def _may_pass(_task: Task[..., Any], _run: TaskRun, state: State) -> bool:
    """Retry what may succeed later; a mistake, or a dead engine, is the same the next time."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and (is_passing(error) or is_full(error))
