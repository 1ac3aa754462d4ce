"""Where a rollout is played: in this process, in a pool of others, or by workers anywhere.

The door and the journal stay in the run's process. A player gets what an agent gets, an example and
the endpoint of each role, and gives back the reward, or what the agent raised.
"""

from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from adapters.agents import Endpoint, Example, Play
from adapters.errors import UserError
from adapters.rewards import Reward, read_reward

HERE = "here"

Written = dict[str, Any]
"""A plain value that is written as JSON."""


@dataclass(frozen=True)
class Job:
    """One attempt at a rollout, to be played."""

    example: Example
    endpoints: Mapping[str, Endpoint]
    alone: bool = False
    """Whether no other may be played in the same process, since an earlier attempt ended one."""

    def written(self) -> Written:
        endpoints = {role: asdict(endpoint) for role, endpoint in self.endpoints.items()}
        return {"example": self.example, "endpoints": endpoints, "alone": self.alone}


def read_job(written: Written) -> Job:
    """The job that `Job.written` wrote."""
    endpoints = {role: Endpoint(**values) for role, values in written["endpoints"].items()}
    return Job(written["example"], endpoints, written["alone"])


@dataclass(frozen=True)
class Playing:
    """A rollout that has begun: where, and what is awaited for its reward."""

    where: str
    reward: Awaitable[Reward]


class Player(Protocol):
    """Plays rollouts between its `__enter__` and its `__exit__`."""

    def begun(self, job: Job) -> AbstractAsyncContextManager[Playing]:
        """Entered when the rollout begins, which may be later; what is left early is cancelled.

        The reward raises what the agent raised, or PlayerLost.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class PlayerLost(Exception):
    """A rollout's process or worker is gone: no fault of the agent, so it is played anew.

    `alone`: by itself, because it may have been what ended the process.
    """

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


class PlayersFailed(UserError):
    """No rollout can be played at all."""


class AgentFailed(Exception):
    """What an agent raised in another process; `kind` is the name of the error's class there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Here:
    """Plays in this process, on the event loop of whoever asks."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @asynccontextmanager
    async def begun(self, job: Job) -> AsyncIterator[Playing]:
        yield Playing(HERE, self._play(job.example, job.endpoints))


async def written_outcome(reward: Awaitable[Reward]) -> Written:
    """How a rollout ended, as `read_outcome` reads it in another process; or PlayersFailed."""
    try:
        return {"reward": (await reward).given()}
    except PlayersFailed:
        raise
    except AgentFailed as error:
        return {"failed": error.kind, "message": str(error)}
    except PlayerLost as lost:
        return {"lost": str(lost), "alone": lost.alone}
    except Exception as error:  # noqa: BLE001  An agent may raise anything; it is told there.
        return {"failed": type(error).__name__, "message": str(error)}


def read_outcome(written: Written) -> Reward:
    """The reward; or raises AgentFailed or PlayerLost."""
    if "reward" in written:
        return read_reward(written["reward"])
    if "lost" in written:
        raise PlayerLost(written["lost"], alone=written["alone"])
    raise AgentFailed(written["failed"], written["message"])


def owed() -> Future[Any]:
    """A future of another thread, which whoever awaits it cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
