"""The HTTP server of an engine: it loads the base model and serves until it is stopped."""

import asyncio
import socket
import threading
from collections.abc import Callable
from types import FrameType

import torch
import transformers
import uvicorn
from safetensors import SafetensorError

from durable.connections import bounded_protocol
from engine.api.app import create_app
from engine.core import EngineCore
from engine.errors import RequestRefused
from engine.model.base_models import BaseModel
from engine.model.gguf_files import UNREADABLE
from engine.model.language_model import LanguageModel
from engine.model.workers import Workers, use_one_thread

CLOSING_SECONDS = 2
KEEP_ALIVE_SECONDS = 600
"""Longer than clients keep a connection, so that none sends a request while it is closed."""


def load_model(
    base: BaseModel, device: str = "cpu", threads: int = 1, dtype: str = "float32"
) -> LanguageModel:
    """Load the base model with its tokenizer; raise RequestRefused if that fails."""
    use_one_thread()
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


def run(
    engine: EngineCore,
    api_key: str,
    listener: socket.socket,
    stopped: threading.Event,
    announce: Callable[[], None],
) -> bool:
    """Serve on a bound socket until `stopped` is set; call `announce` when ready.

    Return whether the last computation has ended.
    """
    asyncio.run(Server(engine, api_key, stopped, announce).serve(sockets=[listener]))
    return engine.close(CLOSING_SECONDS)


class Server(uvicorn.Server):
    """A uvicorn server that stops on `stopped` or a signal, without waiting for long polls."""

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.stopped.is_set():
            self.announce()

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop; uvicorn calls this ten times a second."""
        return self.stopped.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.futures.close()
        await super().shutdown(sockets)
