"""Routes of the server itself: client configuration, health, models and futures."""

import tinker.types
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from engine.api.dependencies import TheEngine

router = APIRouter()

CLIENT_CONFIG = {
    # Chunks of a batch are sent one after the other, so requests arrive in order.
    "parallel_fwdbwd_chunks": False,
    # Each waiting request holds a connection, and a process may open 1024 files.
    "sample_max_concurrent_requests": 256,
}


@router.get("/healthz")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config() -> dict[str, object]:
    return dict(CLIENT_CONFIG)


@router.post("/client/dynamic_config")
async def dynamic_config() -> dict[str, object]:
    return {}


@router.post("/telemetry")
async def telemetry() -> dict[str, str]:
    """Discard the client's telemetry."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def capabilities(engine: TheEngine) -> tinker.types.GetServerCapabilitiesResponse:
    return tinker.types.GetServerCapabilitiesResponse(
        supported_models=[
            tinker.types.SupportedModel(
                model_name=engine.base.name,
                max_context_length=engine.model.max_context,
                trainable=True,
                sampleable=True,
            )
        ]
    )


@router.post("/retrieve_future")
async def retrieve_future(
    request: tinker.types.FutureRetrieveRequest, engine: TheEngine
) -> Response:
    """Return the answer, or 408 after a while: the client then polls again silently."""
    answer = await engine.futures.answer(request.request_id)
    if answer is None:
        pending = {"type": "try_again", "request_id": request.request_id, "queue_state": "active"}
        return JSONResponse(pending, status_code=408)
    return answer
