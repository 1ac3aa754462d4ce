"""The HTTP server of an engine: routes, the API key, and errors in the form the SDK expects."""

import asyncio
import hmac
import socket
import threading
from collections.abc import Callable
from types import FrameType

import torch
import transformers
import uvicorn
from fastapi import FastAPI, Request
from fastapi import HTTPException as BodyTooLarge  # FastAPI passes on no other while it reads
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.durable.connections import bounded_protocol
from ratchet.durable.process import collect_garbage, collect_while_idle
from ratchet.durable.wire.tensors import Malformed
from ratchet.engine.api import run_routes, sampling_routes, training_routes
from ratchet.engine.api.run_routes import SignedUrls
from ratchet.engine.core import EngineCore
from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.base_models import UNREADABLE, BaseModel
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.products import Workers

PREFIX = "/api/v1"
LARGEST_BODY = 2**26
"""Bytes of a request with datums, which the SDK sends in chunks of 5 MB."""
LARGEST_JSON = 2**22
"""Bytes of any other request, whose JSON is read while no other request is answered."""
DATUMS = f"{PREFIX}/forward_backward"
ROUTERS = (sampling_routes.router, training_routes.router, run_routes.router)


def create_app(engine: EngineCore, api_key: str) -> FastAPI:
    app = FastAPI(title="Ratchet engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine, app.state.signed_urls = engine, SignedUrls(api_key)
    for router in ROUTERS:
        app.include_router(router, prefix=PREFIX)
    app.add_exception_handler(RequestRefused, _answer_user_error)
    app.add_exception_handler(Malformed, _answer_user_error)
    app.add_exception_handler(DecodeError, _answer_user_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_failure)
    app.add_middleware(Guard, api_key=api_key, signed=app.state.signed_urls)
    return app


class Guard:
    """Middleware that checks the API key before the request's body is read, and bounds the body.

    A URL that the engine has signed needs no key.
    """

    def __init__(self, app: ASGIApp, api_key: str, signed: SignedUrls) -> None:
        self.app = app
        self.api_key = api_key.encode()
        self.signed = signed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"x-api-key", b"")
            if not (hmac.compare_digest(given, self.api_key) or self.signed.opens(scope)):
                known = "is not this engine's" if given else "is missing"
                detail = f"the X-API-Key {known}; set TINKER_API_KEY to the one the engine printed"
                await _error(401, detail)(scope, receive, send)
                return
        most = LARGEST_BODY if scope.get("path") == DATUMS else LARGEST_JSON
        await self.app(scope, _bounded(receive, most), send)


def _bounded(receive: Receive, most: int) -> Receive:
    """Receive a request whose body may have `most` bytes; HTTPException(413) beyond."""
    size = 0

    async def receive_bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            text = f"the body has more than {most} bytes; send less at once"
            raise BodyTooLarge(413, text)
        return message

    return receive_bounded


def _error(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status)


async def _answer_user_error(_: Request, error: Exception) -> JSONResponse:
    return _error(getattr(error, "status", 400), str(error))


async def _answer_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    sentences = []
    for problem in error.errors()[:5]:
        field = ".".join(str(part) for part in problem["loc"] if part != "body")
        sentences.append(f"{field}: {problem['msg']}" if field else problem["msg"])
    return _error(422, "; ".join(sentences))


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        what = f"{request.method} {request.url.path}"
        return _error(error.status_code, f"{what} is not among the calls this engine serves")
    return _error(error.status_code, error.detail)


async def _answer_failure(_: Request, error: Exception) -> JSONResponse:
    """Answer an unexpected error; Starlette raises the error again, so the server logs it."""
    return _error(400, f"the engine failed on this request: {type(error).__name__}: {error}")


CLOSING_SECONDS = 2
KEEP_ALIVE_SECONDS = 600
"""Longer than clients keep a connection, so that no request meets a connection being closed."""


def load_model(
    base: BaseModel, device: str = "cpu", threads: int = 1, dtype: str = "float32"
) -> LanguageModel:
    """Load the base model with its tokenizer; raise RequestRefused if that fails."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    try:
        model = LanguageModel.load(base.folder, device, name=base.name, dtype=getattr(torch, dtype))
        _ = model.tokenizer
        model.workers = Workers(threads)
        return model
    except RequestRefused:
        raise
    except (OSError, SafetensorError, *UNREADABLE) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestRefused(
            f"{base.folder} cannot be loaded on {device}: {reason.removesuffix('.')}; mend its "
            "files, or choose another base model"
        ) from error


class Server(uvicorn.Server):
    """A uvicorn server that stops on `stopped` or a signal, without waiting for long polls.

    It calls `announce` when it is ready.
    """

    def __init__(
        self,
        engine: EngineCore,
        api_key: str,
        stopped: threading.Event,
        announce: Callable[[], None],
    ) -> None:
        config = uvicorn.Config(
            create_app(engine, api_key),
            http=bounded_protocol(),
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSING_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        super().__init__(config)
        self.engine, self.stopped, self.announce = engine, stopped, announce

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server; unlike uvicorn's method, do not raise the signal again afterwards."""
        self.stopped.set()

    def serve_on(self, listener: socket.socket) -> bool:
        """Serve until the end; return whether the last computation has ended."""
        asyncio.run(self.serve(sockets=[listener]))
        return self.engine.close(CLOSING_SECONDS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        collect_garbage()
        if not self.stopped.is_set():
            self.announce()

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop; uvicorn calls this ten times a second."""
        if self.engine.futures.idle:
            collect_while_idle()
        return self.stopped.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.futures.close()
        await super().shutdown(sockets)
