"""Futures: submitted requests, and their answers, which clients poll for by id."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from uuid import uuid4, uuid5

from fastapi import Response

from engine.errors import Gone, RequestRefused

logger = logging.getLogger(__name__)

POLL_SECONDS = 25.0  # a client gives up on a poll after 45
KEEP_SECONDS = 600.0  # a client repeats a submission for up to 300
KEPT_ANSWER_BYTES = 2**29


def json_answer(content: dict[str, object]) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def protobuf_answer(body: bytes) -> Response:
    return Response(body, media_type="application/x-protobuf")


class Futures:
    """Running requests and, for a while, the answers of finished requests, on one event loop.

    A request has an id and, if the client numbers its requests, a key: the same key again is the
    same request. Finished requests are dropped after `keep_seconds`, or earlier, oldest first, if
    their answers are larger than `keep_bytes`.
    """

    def __init__(
        self,
        keep_seconds: float = KEEP_SECONDS,
        keep_bytes: int = KEPT_ANSWER_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[Response]] = {}
        self._finished: deque[tuple[float, str]] = deque()
        """Times and ids of finished requests, oldest first."""
        self._held_bytes = 0
        self._namespace = uuid4()

    def __len__(self) -> int:
        return len(self._tasks)

    def knows(self, key: Hashable) -> bool:
        """Return True if a request was submitted under this key and its answer is not dropped."""
        return self._id_of(key) in self._tasks

    def submit(self, work: Callable[[], Awaitable[Response]], key: Hashable = None) -> str:
        """Begin the work unless this key has begun it; return the id to poll for."""
        self._drop_old()
        request_id = self._id_of(key)
        if request_id not in self._tasks:
            task = asyncio.create_task(_run(work))
            self._tasks[request_id] = task
            task.add_done_callback(lambda done: self._finish(request_id, done))
        return request_id

    async def answer(self, request_id: str, seconds: float = POLL_SECONDS) -> Response | None:
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

    def _id_of(self, key: Hashable) -> str:
        """Return the id that only this process gives to a key; without a key, a new id."""
        return uuid4().hex if key is None else uuid5(self._namespace, repr(key)).hex

    def _finish(self, request_id: str, task: asyncio.Task[Response]) -> None:
        self._finished.append((self._clock(), request_id))
        self._held_bytes += _size(task)
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop old answers, and the oldest if all are too large, but never the newest answer."""
        oldest_kept = self._clock() - self._keep_seconds
        while len(self._finished) > 1 and (
            self._finished[0][0] < oldest_kept or self._held_bytes > self._keep_bytes
        ):
            _, request_id = self._finished.popleft()
            self._held_bytes -= _size(self._tasks.pop(request_id))


def _size(task: asyncio.Task[Response]) -> int:
    return 0 if task.cancelled() else len(task.result().body)


async def _run(work: Callable[[], Awaitable[Response]]) -> Response:
    """Do the work; a failure is an answer, and the SDK raises RequestFailedError for it.

    Its category "user" blames the request, "server" blames the engine.
    """
    try:
        return await work()
    except RequestRefused as error:
        return json_answer({"error": str(error), "category": "user"})
    except Exception as error:
        logger.exception("a request failed")
        return json_answer({"error": f"{type(error).__name__}: {error}", "category": "server"})
