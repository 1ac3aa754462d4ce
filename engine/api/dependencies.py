"""Dependencies of the routes: the engine, and requests in order."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from engine.core import EngineCore, LiveModel
from engine.errors import RequestRefused
from engine.futures import Answer

Submitted = dict[str, object]


async def _engine(request: Request) -> EngineCore:
    return request.app.state.engine


TheEngine = Annotated[EngineCore, Depends(_engine)]


def submit_in_order(
    engine: EngineCore, live_model: LiveModel, seq_id: int | None, work: Callable[[], Answer]
) -> Submitted:
    """Begin a training client's request once, however often it is sent, on the device thread.

    Request numbers only grow. A request refused with a 4xx leaves a gap, which is allowed.
    """
    model_id, key = live_model.run.run_id, None
    if seq_id is not None:
        key = (model_id, seq_id)
        if not engine.futures.knows(key) and seq_id <= live_model.last_seq:
            raise RequestRefused(
                f"request {seq_id} of {model_id} was carried out already (the newest is "
                f"{live_model.last_seq}) and its answer is no longer kept; send a new request "
                f"with a number above {live_model.last_seq}"
            )
        live_model.last_seq = max(live_model.last_seq, seq_id)
    request_id = engine.futures.submit(lambda: engine.on_device(work), key)
    return {"request_id": request_id, "model_id": model_id}
