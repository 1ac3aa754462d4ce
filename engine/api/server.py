"""The HTTP server of an engine: it loads the base model and serves until it is stopped."""

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import transformers
import uvicorn
from safetensors import SafetensorError

from engine.api.app import create_app
from engine.core import EngineCore
from engine.errors import RequestRefused
from engine.model.base_models import BaseModel
from engine.model.language_model import LanguageModel

CLOSING_SECONDS = 2
KEEP_ALIVE_SECONDS = 600
"""Longer than clients keep a connection, so that none sends a request while it is closed."""

Announce = Callable[[str, int, str], None]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of an engine's process: state folder, torch threads, device and API key."""

    state: Path
    api_key: str
    threads: int = 1
    device: str = "cpu"


def run(
    base: BaseModel,
    settings: ServerSettings,
    listener: socket.socket,
    stopped: threading.Event,
    announce: Announce,
) -> None:
    """Serve on a bound socket until `stopped` is set; announce (host, port, key) when ready."""
    torch.set_num_threads(settings.threads)
    model = _load(base, settings.device)
    engine = EngineCore(base, model, settings.state, settings.threads)
    asyncio.run(_serve(engine, settings.api_key, listener, stopped, announce))
    engine.close(CLOSING_SECONDS)


def _load(base: BaseModel, device: str) -> LanguageModel:
    transformers.logging.disable_progress_bar()
    try:
        model = LanguageModel.load(base.folder, device)
        _ = model.tokenizer  # read from the folder before the public name replaces its path
        model.name = base.name
        return model
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestRefused(f"{base.folder} cannot be loaded on {device}: {reason}") from error


async def _serve(
    engine: EngineCore,
    api_key: str,
    listener: socket.socket,
    stopped: threading.Event,
    announce: Announce,
) -> None:
    server = Server(engine, api_key, stopped)
    host, port = listener.getsockname()[:2]
    server.on_started = lambda: announce(host, port, api_key)
    await server.serve(sockets=[listener])


class Server(uvicorn.Server):
    """A uvicorn server that stops on `stopped` or a signal, without waiting for long polls."""

    def __init__(self, engine: EngineCore, api_key: str, stopped: threading.Event) -> None:
        self.app = create_app(engine, api_key)
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSING_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        super().__init__(config)
        self.stopped = stopped
        self.on_started: Callable[[], None] = lambda: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server; unlike uvicorn's method, do not raise the signal again afterwards."""
        self.stopped.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.stopped.is_set():
            self.on_started()

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop; uvicorn calls this ten times a second."""
        return self.stopped.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.engine.futures.close()
        await super().shutdown(sockets)
