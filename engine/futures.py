"""Futures: submitted requests, and their answers, which clients poll for by id."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from uuid import uuid4, uuid5

from fastapi import Response

from ratchet.engine.errors import Gone, RequestRefused

logger = logging.getLogger(__name__)

POLL_SECONDS = 25.0  # a client gives up on a poll after 45
KEEP_SECONDS = 600.0  # a client repeats a submission for up to 300
KEPT_ANSWER_BYTES = 2**29


def json_answer(content: dict[str, object]) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def protobuf_answer(body: bytes) -> Response:
    return Response(body, media_type="application/x-protobuf")


Kept = tuple[bytes, str]
"""Body and media type of an answer. The garbage collector passes over a plain tuple of such values,
and would look through tens of thousands of tasks and responses."""


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
        self._running: dict[str, asyncio.Task[Response]] = {}
        self._answers: dict[str, Kept] = {}
        self._finished: deque[tuple[float, str]] = deque()
        """Times and ids of finished requests, oldest first."""
        self._held_bytes = 0
        self._namespace = uuid4()

    def __len__(self) -> int:
        return len(self._running) + len(self._answers)

    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        return not self._running

    def knows(self, key: Hashable) -> bool:
        """Return True if a request was submitted under this key and its answer is not dropped."""
        return self._has(self._id_of(key))

    def submit(self, work: Callable[[], Awaitable[Response]], key: Hashable = None) -> str:
        """Begin the work unless this key has begun it; return the id to poll for."""
        self._drop_old()
        request_id = self._id_of(key)
        if not self._has(request_id):
            task = asyncio.create_task(_run(work))
            self._running[request_id] = task
            task.add_done_callback(lambda done: self._finish(request_id, done))
        return request_id

    async def answer(self, request_id: str, seconds: float = POLL_SECONDS) -> Response | None:
        """Return the answer, or None if it did not arrive within `seconds`."""
        if not self._has(request_id):
            raise Gone(
                f"there is no request {request_id!r}: the engine restarted, or the answer is "
                f"older than {self._keep_seconds:.0f} s and was dropped; submit the request again"
            )
        if running := self._running.get(request_id):
            await asyncio.wait({running}, timeout=seconds)  # `_finish` is called before it ends
        kept = self._answers.get(request_id)
        return None if kept is None else Response(kept[0], media_type=kept[1])

    def close(self) -> None:
        """Cancel all running work, so that no client waits for it."""
        for task in self._running.values():
            task.cancel()

    def _has(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._answers

    def _id_of(self, key: Hashable) -> str:
        """Return the id that only this process gives to a key; without a key, a new id."""
        return uuid4().hex if key is None else uuid5(self._namespace, repr(key)).hex

    def _finish(self, request_id: str, task: asyncio.Task[Response]) -> None:
        del self._running[request_id]
        if task.cancelled():
            return
        answer = task.result()
        body = bytes(answer.body)
        self._answers[request_id] = body, str(answer.media_type)
        self._finished.append((self._clock(), request_id))
        self._held_bytes += len(body)
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop old answers, and the oldest if all are too large, but never the newest answer."""
        oldest_kept = self._clock() - self._keep_seconds
        while len(self._finished) > 1 and (
            self._finished[0][0] < oldest_kept or self._held_bytes > self._keep_bytes
        ):
            _, request_id = self._finished.popleft()
            self._held_bytes -= len(self._answers.pop(request_id)[0])


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
