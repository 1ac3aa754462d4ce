"""Routes of the server itself, of sessions, of training runs, and of their checkpoints."""

import hmac
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, quote, urlencode

import tinker.types
from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.types import Scope

from ratchet.engine.core import EngineCore, TheEngine
from ratchet.engine.errors import NotFound, RequestRefused
from ratchet.engine.state.checkpoints import EXTERNAL, CheckpointAddress
from ratchet.engine.state.registry import RunRecord

Limit = Annotated[int, Query(ge=0)]
CLIENT_CONFIG = {
    # Chunks of a batch are sent one after the other, so requests arrive in order.
    "parallel_fwdbwd_chunks": False,
    # Each waiting request holds a connection, and a process may open 1024 files.
    "sample_max_concurrent_requests": 256,
}
SECONDS = 3600
"""Time for which a URL is valid."""


class SignedUrls:
    """URLs signed by the engine's key."""

    def __init__(self, api_key: str) -> None:
        self._key = api_key.encode()

    def sign(self, server: str, path: str, expires: int) -> str:
        """Return the URL of a path of the server, valid until a time in seconds since 1970."""
        query = urlencode({"expires": expires, "signature": self._signature(path, str(expires))})
        return f"{server.rstrip('/')}{quote(path)}?{query}"

    def opens(self, scope: Scope) -> bool:
        """Return whether a request has a signature of its path that is still valid."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        expires, given = (query.get(name, [""])[0] for name in ("expires", "signature"))
        if scope["method"] != "GET" or not given.isascii():
            return False
        signed = hmac.compare_digest(given, self._signature(scope["path"], expires))
        return signed and int(expires) > time.time()

    def _signature(self, path: str, expires: str) -> str:
        return hmac.digest(self._key, f"{expires} {path}".encode(), "sha256").hex()


router = APIRouter()


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


@router.post("/create_session")
async def create_session(
    request: tinker.types.CreateSessionRequest, engine: TheEngine
) -> tinker.types.CreateSessionResponse:
    session = engine.registry.create_session(request)
    return tinker.types.CreateSessionResponse(session_id=session.session_id)


@router.post("/session_heartbeat")
async def heartbeat(
    request: tinker.types.SessionHeartbeatRequest, engine: TheEngine
) -> tinker.types.SessionHeartbeatResponse:
    engine.registry.record_heartbeat(request.session_id)
    return tinker.types.SessionHeartbeatResponse()


@router.get("/sessions")
async def list_sessions(
    engine: TheEngine, limit: Limit = 20, offset: Limit = 0
) -> tinker.types.ListSessionsResponse:
    found = engine.registry.sessions.values()
    newest = sorted(found, key=lambda one: (one.created_at, one.session_id), reverse=True)
    ids = [session.session_id for session in newest]
    return tinker.types.ListSessionsResponse(sessions=ids[offset : offset + limit])


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, engine: TheEngine) -> tinker.types.GetSessionResponse:
    session = engine.registry.sessions.find(session_id)
    runs, samplers = engine.registry.runs.values(), engine.registry.samplers.values()
    return tinker.types.GetSessionResponse(
        training_run_ids=[run.run_id for run in runs if run.session_id == session_id],
        sampler_ids=[one.sampler_id for one in samplers if one.session_id == session_id],
        user_metadata=session.user_metadata,
        display_name=session.display_name,
    )


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, engine: TheEngine) -> None:
    """Close a session and free its memory; saved weights remain."""
    if engine.registry.finish(session_id):
        engine.release(session_id)


CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
Address = Annotated[CheckpointAddress, Depends()]
"""The address in the path of CHECKPOINT."""


@router.get("/training_runs")
async def list_training_runs(
    engine: TheEngine, limit: Limit = 20, offset: Limit = 0
) -> tinker.types.TrainingRunsResponse:
    runs = sorted(
        engine.registry.runs.values(), key=lambda run: (run.created_at, run.run_id), reverse=True
    )
    return tinker.types.TrainingRunsResponse(
        training_runs=[_to_api(engine, run) for run in runs[offset : offset + limit]],
        cursor=tinker.types.Cursor(offset=offset, limit=limit, total_count=len(runs)),
    )


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, engine: TheEngine) -> tinker.types.TrainingRun:
    return _to_api(engine, engine.registry.runs.find(run_id))


def _to_api(engine: EngineCore, run: RunRecord) -> tinker.types.TrainingRun:
    live_model = engine.live_models.get(run.run_id)
    if live_model is not None:
        run = run.model_copy(update={"last_request_time": live_model.used})
    return run.to_api(engine.checkpoints.find_all(run.run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints_of_run(
    run_id: str, engine: TheEngine
) -> tinker.types.CheckpointsListResponse:
    engine.registry.runs.find(run_id)
    found = [checkpoint.to_api() for checkpoint in engine.checkpoints.find_all(run_id)]
    return tinker.types.CheckpointsListResponse(checkpoints=found)


@router.get("/checkpoints")
async def list_checkpoints(
    engine: TheEngine, limit: Limit = 100, offset: Limit = 0
) -> tinker.types.CheckpointsListResponse:
    found = engine.checkpoints.find_all()
    return tinker.types.CheckpointsListResponse(
        checkpoints=[checkpoint.to_api() for checkpoint in found[offset : offset + limit]],
        cursor=tinker.types.Cursor(offset=offset, limit=limit, total_count=len(found)),
    )


@router.delete(CHECKPOINT, status_code=204)
async def delete_checkpoint(address: Address, engine: TheEngine) -> None:
    engine.checkpoints.delete(address)
    engine.resident.remove(str(address))


@router.api_route(f"{CHECKPOINT}/publish", methods=["POST", "DELETE"], status_code=204)
async def publish(address: Address, request: Request, engine: TheEngine) -> None:
    engine.checkpoints.change(address, public=request.method == "POST")


@router.put(f"{CHECKPOINT}/ttl", status_code=204)
async def set_ttl(
    address: Address, engine: TheEngine, ttl_seconds: Annotated[int | None, Body(embed=True)] = None
) -> None:
    """Set a checkpoint's time to live; without a number it never expires."""
    engine.checkpoints.change(address, expires_at=engine.checkpoints.expiry(ttl_seconds))


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    address: Address, engine: TheEngine, request: Request
) -> tinker.types.ExternalWeightsUrlsResponse:
    """Give out the URL of each file of external weights, which opens without a key."""
    expires = int(time.time()) + SECONDS
    folder = request.scope["path"].removesuffix("external_weights_urls") + "files/"
    sign, server = request.app.state.signed_urls.sign, str(request.base_url)
    names = sorted(path.name for path in _external(engine, address).iterdir())
    return tinker.types.ExternalWeightsUrlsResponse(
        urls={name: sign(server, folder + name, expires) for name in names},
        expires=datetime.fromtimestamp(expires, UTC),
    )


@router.get(f"{CHECKPOINT}/files/{{file}}")
async def external_file(address: Address, file: str, engine: TheEngine) -> FileResponse:
    found = {path.name: path for path in _external(engine, address).iterdir()}
    if file not in found:
        raise NotFound(f"{address} has no file {file!r}; it has {', '.join(sorted(found))}")
    return FileResponse(found[file])


def _external(engine: EngineCore, address: CheckpointAddress) -> Path:
    """Return the folder of external weights; RequestRefused for weights of another kind."""
    if address.kind != EXTERNAL:
        raise RequestRefused(
            f"{address} is not for download; load its training state, and save that with "
            "save_weights_external"
        )
    return engine.checkpoints.folder(address)


@router.post("/weights_info")
async def weights_info(
    tinker_path: Annotated[str, Body(embed=True)], engine: TheEngine
) -> tinker.types.WeightsInfoResponse:
    checkpoint = engine.checkpoints.find(CheckpointAddress.parse(tinker_path))
    return tinker.types.WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=True,
        lora_rank=checkpoint.lora.rank,
        train_unembed=checkpoint.lora.train_unembed,
        train_mlp=checkpoint.lora.train_mlp,
        train_attn=checkpoint.lora.train_attn,
    )
