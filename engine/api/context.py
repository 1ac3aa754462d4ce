"""What routes share: the engine they act on, and the shape of a submitted request."""

from collections.abc import Awaitable, Callable, Hashable
from typing import Annotated

from fastapi import Depends, Request

from engine.core import Engine
from engine.errors import UserError
from engine.futures import Answer

Submitted = dict[str, object]


async def _engine(request: Request) -> Engine:
    return request.app.state.engine


TheEngine = Annotated[Engine, Depends(_engine)]


def submit_in_order(
    engine: Engine, model_id: str, seq_id: int | None, work: Callable[[], Awaitable[Answer]]
) -> Submitted:
    """Begin a training client's request, once, however often it is sent.

    Numbers only grow. Gaps are allowed: a request refused with a 4xx leaves one.
    """
    trainee = engine.trainee(model_id)
    key: Hashable = None
    if seq_id is not None:
        key = (model_id, seq_id)
        known = engine.futures.known(key)
        if known is None and seq_id <= trainee.last_seq:
            raise UserError(
                f"request {seq_id} of {model_id} was carried out already (the newest is "
                f"{trainee.last_seq}) and its answer is no longer kept"
            )
        trainee.last_seq = max(trainee.last_seq, seq_id)
    return {"request_id": engine.futures.submit(work, key), "model_id": model_id}
