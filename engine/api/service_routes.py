"""Routes of the server itself and of sessions: each ServiceClient has one session."""

from typing import Annotated

import tinker.types
from fastapi import APIRouter, Body, Response
from fastapi.responses import JSONResponse
from tinker.types import session_status
from tinker.types.session_status import ClientSessionFinished
from tinker.types.session_status_query import ClientFinishedSessionStatusQuery, SessionStatusQuery

from ratchet.engine.api.conversion import Limit, TheEngine
from ratchet.engine.core import EngineCore
from ratchet.engine.state.registry import OWNER, SessionRecord

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


@router.post("/sessions/search")
async def search(
    request: tinker.types.SessionSearchRequest, engine: TheEngine
) -> tinker.types.SessionSearchResponse:
    """Search sessions, newest first; ids order sessions of the same time."""
    found = [
        session
        for session in _newest_first(engine)
        if _matches(request, session, engine.registry.status(session))
    ]
    if request.cursor:
        last = (request.cursor.last_created_at, request.cursor.last_session_id)
        found = [one for one in found if (one.created_at, one.session_id) < last]
    page = found[: request.limit]
    cursor = None
    if len(found) > len(page):
        cursor = tinker.types.SessionSearchCursor(
            last_created_at=page[-1].created_at, last_session_id=page[-1].session_id
        )
    return tinker.types.SessionSearchResponse(
        sessions=[_summarize(engine, session) for session in page], next_cursor=cursor
    )


@router.get("/sessions")
async def list_sessions(
    engine: TheEngine, limit: Limit = 20, offset: Limit = 0
) -> tinker.types.ListSessionsResponse:
    ids = [session.session_id for session in _newest_first(engine)]
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
async def finish(
    session_id: str,
    reason: Annotated[session_status.ClientSessionFinishReason, Body()],
    engine: TheEngine,
    detail: Annotated[str | None, Body()] = None,
) -> None:
    """Close a session and free its memory; saved weights remain."""
    ended = ClientSessionFinished(reason=reason, detail=detail)
    if engine.registry.finish(session_id, ended):
        engine.release(session_id)


@router.put("/sessions/{session_id}/project", status_code=204)
async def assign_project(
    session_id: str, project_id: Annotated[str, Body(embed=True)], engine: TheEngine
) -> None:
    session = engine.registry.sessions.find(session_id)
    moved = session.model_copy(update={"project_id": project_id})
    engine.registry.sessions.put(session_id, moved)


@router.get("/sessions/{session_id}/trace_export")
async def export_timeline(session_id: str, engine: TheEngine) -> dict[str, str]:
    engine.registry.sessions.find(session_id)
    return {"status": "failed", "error": "the engine keeps no timeline of a session's requests"}


def _newest_first(engine: EngineCore) -> list[SessionRecord]:
    sessions = engine.registry.sessions.values()
    return sorted(sessions, key=lambda one: (one.created_at, one.session_id), reverse=True)


def _matches(
    request: tinker.types.SessionSearchRequest,
    session: SessionRecord,
    status: session_status.SessionStatus | None,
) -> bool:
    """Return True if all criteria hold; a session id and a display name are alternatives."""
    metadata = session.user_metadata or {}
    if any(metadata.get(name) != value for name, value in request.user_metadata.items()):
        return False
    if request.project_ids is not None and session.project_id not in request.project_ids:
        return False
    if request.statuses is not None and not any(_fits(status, one) for one in request.statuses):
        return False
    if request.session_id is None and request.display_name is None:
        return True
    shown = (session.display_name or "").lower()
    words = (request.display_name or "").lower().split()
    named = bool(words) and all(word in shown for word in words)
    return named or session.session_id == request.session_id


def _fits(status: session_status.SessionStatus | None, query: SessionStatusQuery) -> bool:
    match status, query:
        case ClientSessionFinished(), ClientFinishedSessionStatusQuery(reasons=list(reasons)):
            return status.reason.type in reasons
    return status is not None and status.type == query.type


def _summarize(engine: EngineCore, session: SessionRecord) -> tinker.types.SessionSummary:
    runs = [run for run in engine.registry.runs.values() if run.session_id == session.session_id]
    checkpoints = [one for run in runs for one in engine.checkpoints.find_all(run.run_id)]
    return tinker.types.SessionSummary(
        session_id=session.session_id,
        created_at=session.created_at,
        owner=OWNER,
        project_id=session.project_id,
        status=engine.registry.status(session),
        checkpoints_count=len(checkpoints),
        display_name=session.display_name,
        user_metadata=session.user_metadata,
        checkpoint_storage_bytes=sum(one.size_bytes for one in checkpoints),
    )
