"""Futures: submitted requests, and their answers, which clients poll for by id."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from uuid import uuid4

from engine.errors import Gone, RequestRefused

logger = logging.getLogger(__name__)

POLL_SECONDS = 25.0  # a client gives up on a poll after 45
KEEP_SECONDS = 600.0  # a client repeats a submission for up to 300
KEEP_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Answer:
    """The encoded body of a finished request."""

    body: bytes
    media_type: str


def json_answer(content: dict[str, object]) -> Answer:
    return Answer(json.dumps(content).encode(), "application/json")


def protobuf_answer(body: bytes) -> Answer:
    return Answer(body, "application/x-protobuf")


def failure_answer(message: str, category: str) -> Answer:
    """Encode a failure for the SDK, which raises RequestFailedError.

    The category "user" blames the request, "server" blames the engine.
    """
    return json_answer({"error": message, "category": category})


@dataclass(frozen=True, slots=True)
class _Finished:
    time: float
    request_id: str
    size: int


class Futures:
    """Running requests and, for a while, the answers of finished ones, on one event loop.

    A request has an id and, if the client numbers its requests, a key: the same key again is the
    same request. Finished requests are dropped after `keep_seconds`, or earlier, oldest first, if
    their answers are larger than `keep_bytes`.
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
        """Return the id of the request already submitted under this key, or None."""
        return self._ids.get(key)

    def submit(self, work: Callable[[], Awaitable[Answer]], key: Hashable = None) -> str:
        """Begin the work unless this key has begun it; return the id to poll for."""
        self._drop_old()
        if key is not None and key in self._ids:
            return self._ids[key]
        request_id = uuid4().hex
        task = asyncio.create_task(_run(work))
        self._tasks[request_id] = task
        if key is not None:
            self._ids[key] = request_id
            self._keys[request_id] = key
        task.add_done_callback(lambda done: self._finish(request_id, done))
        return request_id

    async def answer(self, request_id: str, seconds: float = POLL_SECONDS) -> Answer | None:
        """Return the answer, or None if it did not arrive within `seconds`."""
        task = self._tasks.get(request_id)
        if task is None:
            raise Gone(
                f"there is no request {request_id!r}: the engine restarted, or the answer is "
                f"older than {self._keep_seconds:.0f} s and was dropped; submit the request again"
            )
        await asyncio.wait({task}, timeout=seconds)
        return task.result() if task.done() and not task.cancelled() else None

    def close(self) -> None:
        """Cancel all running work, so that no client waits for it."""
        for task in self._tasks.values():
            task.cancel()

    def _finish(self, request_id: str, task: asyncio.Task[Answer]) -> None:
        size = 0 if task.cancelled() else len(task.result().body)
        self._finished.append(_Finished(self._clock(), request_id, size))
        self._held_bytes += size
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop old answers, and the oldest if all are too large, but never the newest answer."""
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


async def _run(work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        return await work()
    except RequestRefused as error:
        return failure_answer(str(error), "user")
    except Exception as error:
        logger.exception("a request failed")
        return failure_answer(f"{type(error).__name__}: {error}", "server")
