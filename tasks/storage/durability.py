"""Durable tasks: Prefect tasks that are done when the file they write is there.

Prefect's own results would be a second truth, and Prefect does not write them atomically, so no
results are kept. A task whose file exists ends at once in the state *Cached*: in a retry of the
task, in a retry of the flow, and in another flow run.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path, PosixPath
from typing import Concatenate, ParamSpec, cast

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from ratchet.adapters.errors import PassingError
from ratchet.adapters.tinker.costs import working_on
from ratchet.tasks.storage.files import is_full, is_written

RETRY_DELAYS = [2.0, 10.0, 30.0]

P = ParamSpec("P")


class WrittenFile(PosixPath):
    """Path that can be referenced weakly, since Prefect refers to results of tasks so."""


class DurableTask(Task[P, Path]):
    """Task that writes a file. A call returns the path even where Prefect would return a state."""

    # Prefect's overloads are for coroutines too.
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: P.args, **kwargs: P.kwargs
    ) -> Path:
        made = super().__call__(*args, **kwargs)
        return made if isinstance(made, Path) else made.result()

    def make(self, *args: P.args, **kwargs: P.kwargs) -> Path:
        """Write the file unless it is there, as the task does, but unknown to Prefect."""
        made: Path | State[Path] = self.fn(*args, **kwargs)
        # Its `result()` would take a turn of an event loop.
        return made if isinstance(made, Path) else cast(Path, made.data)


def durable(write: Callable[Concatenate[Path, P], None]) -> "DurableTask[Concatenate[Path, P]]":
    """Make a Prefect task of a function that writes the file `path`; the task returns the path.

    The function writes the file whole (`tasks.storage.files.appearing`), so an interrupted try
    leaves nothing. A task run is named after its file. Errors that may pass are retried.

    Prefect looks for futures in the collections and dataclasses among the arguments, and fails if
    one of them changes meanwhile; so an object that changes must have a plain class.
    """

    @wraps(write)
    def stage(path: Path, *args: P.args, **kwargs: P.kwargs) -> Path:
        if is_written(path):
            cached = Completed(name="Cached", message=f"{path} is there", data=WrittenFile(path))
            return cast(Path, cached)  # Prefect takes a returned state as the task run's
        with working_on(task_name(path)):
            write(path, *args, **kwargs)
        return WrittenFile(path)

    return DurableTask(
        stage,
        name=write.__name__,
        task_run_name=cast("Callable[..., str]", lambda parameters: task_name(parameters["path"])),
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_DELAYS),
        retry_delay_seconds=RETRY_DELAYS,
        retry_condition_fn=_may_pass,
    )


def task_name(path: Path) -> str:
    """Name a task after its file: `datums/00003`, `policies/listener/datums/00003`."""
    policies = [f"policies/{path.parts[-3]}"] if path.parts[-4:-3] == ("policies",) else []
    return "/".join([*policies, path.parent.name, path.stem])


def _may_pass(_task: Task[..., Path], _run: TaskRun, state: State) -> bool:
    """Return whether a retry may succeed: a mistake or a dead engine fails again."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, PassingError) or (isinstance(error, BaseException) and is_full(error))
