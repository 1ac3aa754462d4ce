"""The HTTP API as an application: routes, the key, and errors that a client understands."""

import hmac
import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api import runs, sampling, service, sessions, training, weights
from engine.core import Engine
from engine.errors import UserError

logger = logging.getLogger(__name__)

PREFIX = "/api/v1"


def create_app(engine: Engine, api_key: str) -> FastAPI:
    app = FastAPI(title="Ratchet engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine = engine
    for subject in (sampling, service, training, weights, sessions, runs):
        app.include_router(subject.router, prefix=PREFIX)
    app.add_exception_handler(UserError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unserved)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(KeyGuard, api_key=api_key)
    return app


class KeyGuard:
    """Lets through who knows the key, before anything of the request is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self.api_key):
                known = "is not this engine's" if given else "is missing"
                detail = f"the X-API-Key {known}; set TINKER_API_KEY to the one the engine printed"
                await _error(401, detail)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _error(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    return _error(getattr(error, "status", 400), str(error))


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    sentences = []
    for problem in error.errors()[:5]:
        place = ".".join(str(part) for part in problem["loc"] if part != "body")
        sentences.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    return _error(422, "; ".join(sentences))


async def _unserved(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        what = f"{request.method} {request.url.path}"
        return _error(error.status_code, f"{what} is not among the calls this engine serves")
    return _error(error.status_code, error.detail)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    """The last resort. Starlette raises the error again, so the server logs where it came from."""
    return _error(400, f"the engine failed on this request: {type(error).__name__}: {error}")
