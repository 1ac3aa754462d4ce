"""Start-up of Prefect: its settings, and its embedded server, begun before Prefect is needed."""

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Event, Thread

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import check_listener, check_proxies
from ratchet.adapters.process.child import tell_status
from ratchet.adapters.process.clock import Wait
from ratchet.flows.server.embedded_server import EmbeddedServer

PREFECT_WORKERS = ("APILogWorker", "EventsWorker")
"""Loggers of Prefect's to which its log levels do not apply."""

RETRIED = {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "500"}
"""Setting of clients: a server answers so while its PostgreSQL is away."""

RESTART_LOOK_SECONDS = 2.0
SILENT = "Prefect's embedded server, without which the training goes on,"

_begun: list[EmbeddedServer] = []
"""The server that was begun and is not started yet, if there is one."""
_started: list[EmbeddedServer] = []

log = logging.getLogger(__name__)


def begin_server() -> None:
    """Begin to load Prefect's embedded server, unless the environment names another server.

    It opens nothing before it is started, and one that is never started ends with this process.
    """
    if not (_begun or os.environ.get("PREFECT_API_URL")):
        atexit.register(_drop_begun)
        _begun.append(EmbeddedServer())


@contextmanager
def start_server() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Begin to start Prefect's embedded server, unless another server is set; keep it running.

    Prefect itself would start it when the flow is called, and never again. Ctrl-C does not reach
    it. Yields a function whose block waits for its answer, and has it as the server that is set.
    """
    if _known_server():
        _drop_begun()  # a profile may name another server, which the environment does not
        yield nullcontext
        return
    server = _begun.pop() if _begun else EmbeddedServer()
    server.start()
    _started[:] = [server]
    yield partial(_served, server)


def last_said() -> str:
    return "".join(server.last_words() for server in _started)


def _drop_begun() -> None:
    while _begun:
        _begun.pop().child.end(0)


@contextmanager
def _served(server: EmbeddedServer) -> Iterator[None]:
    """Wait for a server, and have it be the one of this block and of threads that begin in it.

    A flow prints no links to it. UserError if it does not answer in time.
    """
    from prefect import settings
    from prefect.context import _temporary_global_settings_context, get_settings_context

    try:
        server.wait(settings.PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
    except RuntimeError as error:
        read = [n for n in sorted(os.environ) if n.startswith("PREFECT_API_")]
        raise UserError(
            f"Prefect's embedded server does not start: {error}. Its files are in "
            f"{settings.PREFECT_HOME.value()}; mend what it says, or a variable that it reads "
            f"({', '.join(('PREFECT_HOME', *read))}), and repeat the command"
        ) from error
    over = Event()
    keeper = Thread(target=_keep_running, args=(server, over), daemon=True)
    keeper.start()
    try:
        with (
            settings.temporary_settings(
                {settings.PREFECT_API_URL: server.api_url, settings.PREFECT_UI_URL: ""}
            ),
            _temporary_global_settings_context(get_settings_context()),
        ):
            yield
    finally:
        over.set()
        keeper.join()


def check_prefect() -> None:
    """Raise UserError if nothing listens at PREFECT_API_URL, or if no client reads the proxies."""
    check_proxies()
    if url := _known_server():
        check_server(url, "mend PREFECT_API_URL, or unset it to run beside an embedded server")


def _known_server() -> str | None:
    """Return the address of a server that the environment or a profile names."""
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value()


def check_server(address: str, otherwise: str) -> None:
    """Raise UserError if nothing listens at a server's address."""
    remedy = f"start one with `ratchet server`, or {otherwise}"
    check_listener(address, f"the Prefect server at {address}", remedy)


def _keep_running(server: EmbeddedServer, over: Event) -> None:
    """Start the server again whenever its process has ended; log its silence."""
    waiting = None
    while not over.wait(RESTART_LOOK_SECONDS):
        process = server.child.process
        if process.poll() is None:
            waiting = None if server.answers() else waiting or Wait(SILENT, None)
            if waiting is not None:
                waiting.speak()
            continue
        log.warning(
            "Prefect's embedded server (process %d) %s%s: it is started again",
            process.pid,
            tell_status(process.returncode),
            server.last_words(),
        )
        server.restart()


def quiet_prefect(verbose: bool) -> None:
    """Set Prefect's log level and time-outs, which it reads when it is imported."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "ERROR" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "WARNING" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    if os.environ.get("PREFECT_API_URL"):
        os.environ |= {**RETRIED, **os.environ}
    if not verbose:
        for worker in PREFECT_WORKERS:
            logging.getLogger(worker).setLevel(logging.CRITICAL)
