"""A bound socket and a base model → a server that answers, until it is told to stop."""

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import transformers
import uvicorn
from safetensors import SafetensorError

from engine.base_models import BaseModel
from engine.core import Engine
from engine.errors import UserError
from engine.model import LanguageModel
from engine.server import create_app

CLOSING_SECONDS = 2
Announce = Callable[[str, int, str], None]


def run(
    base: BaseModel,
    listener: socket.socket,
    state: Path,
    threads: int,
    device: str,
    api_key: str,
    stopped: threading.Event,
    announce: Announce,
) -> None:
    """Announce (host, port, key) once requests are answered; return when `stopped` is set."""
    torch.set_num_threads(threads)
    model = _loaded(base, device)
    engine = Engine(base, model, state, threads)
    asyncio.run(_serve(engine, listener, api_key, stopped, announce))
    engine.close(CLOSING_SECONDS)


def _loaded(base: BaseModel, device: str) -> LanguageModel:
    transformers.logging.disable_progress_bar()
    try:
        model = LanguageModel.load(base.folder, device)
        _ = model.tokenizer  # read from the folder, before the name is the public one
        model.name = base.name
        return model
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{base.folder} cannot be loaded on {device}: {reason}") from error


async def _serve(
    engine: Engine,
    listener: socket.socket,
    api_key: str,
    stopped: threading.Event,
    announce: Announce,
) -> None:
    server = Server(engine, api_key, stopped)
    host, port = listener.getsockname()[:2]
    server.on_started = lambda: announce(host, port, api_key)
    await server.serve(sockets=[listener])


class Server(uvicorn.Server):
    """Stops when `stopped` is set or a signal comes, without waiting for long polls."""

    def __init__(self, engine: Engine, api_key: str, stopped: threading.Event) -> None:
        config = uvicorn.Config(
            create_app(engine, api_key),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
        self.engine = engine
        self.stopped = stopped
        self.on_started: Callable[[], None] = lambda: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the process in peace; uvicorn's own would raise the signal again afterwards."""
        self.stopped.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.stopped.is_set():
            self.on_started()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        return self.stopped.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.futures.close()
        await super().shutdown(sockets)
