"""A bridge before a server that speaks an older wire than the SDK, as a child process.

The SDK offers no transport of one's own, and what a bridge knows of a run's models must be one for
all of the run's processes. A process of its own also outlives a run that is killed, for as long as
it takes to give back the server's places for models.
"""

import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

from ratchet.adapters.errors import EngineDied, ServiceError
from ratchet.adapters.process.child import ChildProcess, tell_status
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.wires.older_server import UNLOADING_SECONDS
from ratchet.adapters.wires.older_wire import OlderWire, ask_wire

BRIDGE_STARTING_SECONDS = 120.0

log = logging.getLogger(__name__)


@contextmanager
def bridged(server: TinkerServer) -> Iterator[TinkerServer]:
    """Yield a server that speaks the SDK's wire: this one or, if it does not, a bridge before it.

    The SDK's own service, which has no URL here, is not asked, nor one whose key the SDK finds by
    itself. httpx.HTTPError if a server does not answer.
    """
    wire = ask_wire(server.url, server.key) if server.url and server.key else None
    if wire is None:
        yield server
        return
    log.info("%s speaks the wire of the SDK %s: a bridge translates", server.url, wire.sdk)
    with running_bridge(server, wire) as bridge:
        yield bridge


@contextmanager
def running_bridge(server: TinkerServer, wire: OlderWire) -> Iterator[TinkerServer]:
    """Yield a bridge before a server of an older wire, which ends with this block."""
    child = ChildProcess([sys.executable, "-P", "-m", "ratchet.adapters.wires.program"])
    died: Future[None] = Future()
    try:
        child.tell(json.dumps([server.url, server.key, wire.datums]).encode())
        url = (child.hear(BRIDGE_STARTING_SECONDS) or b"").decode().strip()
        if not url:
            raise ServiceError(
                f"the bridge to {server.url} did not start; look at what it printed above, and "
                "start the same run again"
            )
        Thread(target=_watch, args=(child, died), daemon=True).start()
        yield TinkerServer(url, server.key, died, None, wire.sdk)
    finally:
        died.cancel()
        child.end(2 * UNLOADING_SECONDS)


def _watch(child: ChildProcess, died: Future[None]) -> None:
    code = child.process.wait()
    if died.set_running_or_notify_cancel():
        died.set_exception(
            EngineDied(
                f"the bridge to the Tinker service (process {child.process.pid}) "
                f"{tell_status(code)}; start the same run again and it continues"
            )
        )
