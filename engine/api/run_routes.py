"""Routes of training runs and their checkpoints, whose files are opened by signed URLs."""

import hmac
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, quote, urlencode

import tinker.types
from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.responses import FileResponse
from starlette.types import Scope

from ratchet.engine.api.conversion import Limit, TheEngine
from ratchet.engine.core import EngineCore
from ratchet.engine.errors import NotFound, RequestRefused
from ratchet.engine.state.checkpoints import EXTERNAL, CheckpointAddress
from ratchet.engine.state.registry import RunRecord

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
    address: Address,
    engine: TheEngine,
    ttl_seconds: Annotated[int | None, Body(embed=True)] = None,
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


@router.post("/copy_weights")
async def copy_weights(
    request: tinker.types.CopyWeightsRequest,
    engine: TheEngine,
    x_idempotency_key: Annotated[str | None, Header()] = None,
) -> tinker.types.CopyWeightsResponse:
    """Copy a checkpoint to a new run, which cannot be trained; a repeated request copies once."""
    source = CheckpointAddress.parse(request.source_path)
    engine.checkpoints.find(source)
    engine.checkpoints.expiry(request.ttl_seconds)
    if x_idempotency_key in engine.copies:
        return tinker.types.CopyWeightsResponse(tinker_path=engine.copies[x_idempotency_key])
    run_id = _run_for_copy(engine, request, source)
    copied = engine.checkpoints.copy(source, run_id, request.ttl_seconds)
    if x_idempotency_key is not None:
        engine.copies[x_idempotency_key] = str(copied.address)
    return tinker.types.CopyWeightsResponse(tinker_path=str(copied.address))


def _run_for_copy(
    engine: EngineCore, request: tinker.types.CopyWeightsRequest, source: CheckpointAddress
) -> str:
    if request.session_id is not None and request.model_seq_id is not None:
        session_id = engine.registry.open_session(request.session_id).session_id
    elif request.destination_project_id is not None:
        session = tinker.types.CreateSessionRequest(
            tags=[],
            user_metadata=None,
            sdk_version="copy_weights",
            project_id=request.destination_project_id,
            display_name=f"copy of {source}",
        )
        session_id = engine.registry.create_session(session).session_id
    else:
        raise RequestRefused("give a destination_project_id, or a session_id with a model_seq_id")
    run_id = f"{session_id}:train:{request.model_seq_id or 0}"
    if run_id in engine.registry.runs:
        raise RequestRefused(f"{run_id} exists; give the next model_seq_id")
    checkpoint = engine.checkpoints.find(source)
    engine.registry.create_run(
        run_id, session_id, checkpoint.base_model, checkpoint.lora, {"copy_of": str(source)}
    )
    return run_id
