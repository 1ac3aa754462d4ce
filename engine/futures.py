"""Submitted work → answers that are asked for, by id, until they come."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from uuid import uuid4

from engine.errors import Gone, UserError

logger = logging.getLogger(__name__)

POLL_SECONDS = 25.0  # a client gives up on a poll after 45
KEEP_SECONDS = 600.0  # a client repeats a submission for up to 300
KEEP_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a finished request, as it goes over the wire."""

    body: bytes
    media_type: str


def document(content: dict[str, object]) -> Answer:
    return Answer(json.dumps(content).encode(), "application/json")


def protobuf(body: bytes) -> Answer:
    return Answer(body, "application/x-protobuf")


def failure(message: str, category: str) -> Answer:
    """What the SDK raises as RequestFailedError; a "user" one blames the request, "server" us."""
    return document({"error": message, "category": category})


@dataclass(frozen=True, slots=True)
class _Finished:
    time: float
    request_id: str
    size: int


class Futures:
    """Requests under way and, for a while, the answers of finished ones.

    Lives on one event loop. A request is known by its id and, where the client numbers its
    requests, by a key: the same key again is the same request. Finished ones are forgotten after
    `keep_seconds`, or sooner, oldest first, when they hold more than `keep_bytes`.
    """

    def __init__(
        self,
        keep_seconds: float = KEEP_SECONDS,
        keep_bytes: int = KEEP_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._ids: dict[Hashable, str] = {}
        self._keys: dict[str, Hashable] = {}
        self._finished: deque[_Finished] = deque()
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def known(self, key: Hashable) -> str | None:
        """The id of the request already submitted under this key."""
        return self._ids.get(key)

    def submit(self, work: Callable[[], Awaitable[Answer]], key: Hashable = None) -> str:
        """Begin the work, unless it has begun under this key; either way, the id to ask for."""
        self._forget()
        if key is not None and key in self._ids:
            return self._ids[key]
        request_id = uuid4().hex
        task = asyncio.create_task(_carried_out(work))
        self._tasks[request_id] = task
        if key is not None:
            self._ids[key] = request_id
            self._keys[request_id] = key
        task.add_done_callback(lambda done: self._finish(request_id, done))
        return request_id

    async def answer(self, request_id: str, seconds: float = POLL_SECONDS) -> Answer | None:
        """The answer, or None if it has not come within `seconds`."""
        task = self._tasks.get(request_id)
        if task is None:
            raise Gone(
                f"no request {request_id!r} is under way: the engine restarted, or the answer came "
                f"more than {self._keep_seconds:.0f} s ago and was dropped; submit it again"
            )
        await asyncio.wait({task}, timeout=seconds)
        return task.result() if task.done() and not task.cancelled() else None

    def close(self) -> None:
        """Give up all work under way, so that nobody is kept waiting for it."""
        for task in self._tasks.values():
            task.cancel()

    def _finish(self, request_id: str, task: asyncio.Task[Answer]) -> None:
        size = 0 if task.cancelled() else len(task.result().body)
        self._finished.append(_Finished(self._clock(), request_id, size))
        self._held_bytes += size
        self._forget()

    def _forget(self) -> None:
        """Drop what is too old, and the oldest of too much, but never the newest answer."""
        oldest_kept = self._clock() - self._keep_seconds
        while len(self._finished) > 1 and (
            self._finished[0].time < oldest_kept or self._held_bytes > self._keep_bytes
        ):
            dropped = self._finished.popleft()
            self._held_bytes -= dropped.size
            del self._tasks[dropped.request_id]
            key = self._keys.pop(dropped.request_id, None)
            if key is not None:
                del self._ids[key]


async def _carried_out(work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        return await work()
    except UserError as error:
        return failure(str(error), "user")
    except Exception as error:
        logger.exception("a request failed")
        return failure(f"{type(error).__name__}: {error}", "server")
