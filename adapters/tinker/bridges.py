"""A bridge before a server that speaks an older wire than the SDK, as a child process.

It is one for all of the run's processes, and outlives a killed run until it has given back models.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, cast

import httpx
import numpy as np
from pyqwest import HTTPTransport
from pyqwest.httpx import AsyncPyqwestTransport
from tinker import _base_client
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.errors import EngineDied, ServiceError
from ratchet.adapters.network.answers import ask, said_instead, send_bounded
from ratchet.adapters.process.child import ChildProcess, tell_status
from ratchet.adapters.redaction import cut
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.wires.bridge import SDK_OF, Codec
from ratchet.adapters.wires.older_server import (
    API,
    KEY_REFUSED,
    NO_ROUTE,
    PROTOBUF,
    UNKNOWN_ROUTE,
    UNLOADING_SECONDS,
)
from ratchet.durable.wire.datums import to_json
from ratchet.durable.wire.tensors import encode_tensor

BRIDGE_STARTING_SECONDS = 120.0
ASKING_SECONDS = 30.0
NOBODY = "ratchet-asks"
"""Name of a session and a model that no server has, so that the calls change nothing."""
CREATION = {
    "session_id": NOBODY,
    "model_seq_id": 0,
    "path": f"tinker://{NOBODY}:train:0/weights/none",
    "optimizer": True,
}
"""A training client that is to be created by loading."""
UNDERSTOOD = (200, 201, 202, 400, 404, 409)
"""Answers to a call that was understood, even if no such model is there."""

log = logging.getLogger(__name__)


@contextmanager
def bridged(server: TinkerServer) -> Iterator[TinkerServer]:
    """Yield a server that speaks the SDK's wire: this one or, if it does not, a bridge before it.

    The SDK's own service, which has no URL here, is not asked, nor one whose key the SDK finds by
    itself. httpx.HTTPError if a server does not answer.
    """
    datums = ask_wire(server.url, server.key) if server.url and server.key else None
    if datums is None:
        yield server
        return
    log.info("%s speaks the wire of the SDK %s: a bridge translates", server.url, SDK_OF[datums])
    with running_bridge(server, datums) as bridge:
        yield bridge


@contextmanager
def running_bridge(server: TinkerServer, datums: Codec) -> Iterator[TinkerServer]:
    """Yield a bridge before a server of an older wire, which ends with this block."""
    child = ChildProcess([sys.executable, "-P", "-m", "ratchet.adapters.wires.program"])
    died: Future[None] = Future()
    try:
        child.tell(json.dumps([server.url, server.key, datums]).encode())
        url = (child.hear(BRIDGE_STARTING_SECONDS) or b"").decode().strip()
        if not url:
            raise ServiceError(
                f"the bridge to {server.url} did not start; look at what it printed above, and "
                "start the same run again"
            )
        Thread(target=_watch, args=(child, died), daemon=True).start()
        yield TinkerServer(url, server.key, died, None, SDK_OF[datums])
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


def ask_wire(url: str, key: str) -> Codec | None:
    """Return the form of datums of a wire older than the SDK's; None for a server of the SDK's.

    Asked to load weights that are nowhere, the SDK's refuses them, and an older one misses a
    `model_id`. httpx.HTTPError if it does not answer, ServiceError if it reads no datums.
    """
    created = _ask(url, key, "load_weights", json=CREATION)
    if broken := said_instead(created):
        raise ServiceError(f"the Tinker service at {url} cannot be asked: {broken}")
    if created.status_code in KEY_REFUSED or not _is_older(created):
        return None
    return _ask_codec(url, key)


def _ask(url: str, key: str, call: str, **body: Any) -> httpx.Response:
    headers = {"X-API-Key": key} | body.pop("headers", {})
    return ask("POST", f"{url.rstrip('/')}{API}{call}", ASKING_SECONDS, headers=headers, **body)


def _is_older(answer: httpx.Response) -> bool:
    if answer.status_code in NO_ROUTE:
        return answer.status_code == 405 or answer.text == UNKNOWN_ROUTE
    return answer.status_code >= 400 and bool(re.search(r"\bmodel_id\b", answer.text))


def _ask_codec(url: str, key: str) -> Codec:
    """Send a loss of a model that is nowhere, in both forms; return the one that is understood."""
    tokens = np.zeros(1, np.int32).tobytes()
    message = pb.ForwardBackwardRequest(model_id=NOBODY, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    for name, values in {"target_tokens": np.zeros(1, int), "weights": np.ones(1)}.items():
        datum.loss_fn_inputs[name].CopyFrom(encode_tensor(values))
    call, form = "forward_backward", {"Content-Type": PROTOBUF}
    sent = _ask(url, key, call, content=message.SerializeToString(), headers=form)
    if sent.status_code in UNDERSTOOD:
        return "protobuf"
    written = _ask(url, key, call, json=to_json(message))
    if written.status_code in UNDERSTOOD:
        return "json"
    raise ServiceError(
        f"the server at {url} reads datums neither in protobuf ({sent.status_code}) nor in JSON "
        f"({written.status_code}: {cut(written.text)}); it serves no training, or another API"
    )


def _transport() -> httpx.AsyncBaseTransport:
    """Return the SDK's transport, which by itself would send keys wherever a redirect leads."""
    off = dict.fromkeys(("follow_redirects", "enable_gzip", "enable_brotli", "enable_zstd"), False)
    return AsyncPyqwestTransport(HTTPTransport(tls_include_system_certs=True, **off))


cast(Any, _base_client).AsyncHttpxClientWrapper.send = send_bounded  # the SDK takes no client
_base_client._default_pyqwest_transport = _transport
