"""Which wire a server of the Tinker API speaks, as its answers to two calls of ours tell."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.errors import ServiceError
from ratchet.durable.wire.datums import to_json
from ratchet.durable.wire.tensors import encode_tensor

Codec = Literal["protobuf", "json"]

API = "/api/v1/"
PROTOBUF = "application/x-protobuf"
NOBODY = "ratchet-asks"
"""Name of a session and a model that no server has, so that the calls change nothing."""
ASKING_SECONDS = 30.0
KEY_REFUSED = (401, 403)
UNDERSTOOD = (200, 201, 202, 400, 404, 409)
"""Answers to a call that was understood, even if no such model is there."""
NO_ROUTE = (404, 405)
UNKNOWN_ROUTE = '{"detail":"Not Found"}'
"""Answer of a FastAPI server that has no such call at all."""


@dataclass(frozen=True)
class OlderWire:
    """A wire from before a training client was created by loading, as datums are written in it.

    JSON is the wire up to SDK 0.24, protobuf that from 0.25 on.
    """

    datums: Codec

    @property
    def sdk(self) -> str:
        """The newest SDK that certainly speaks it."""
        return "0.25" if self.datums == "protobuf" else "0.24"


def ask_wire(url: str, key: str) -> OlderWire | None:
    """Return a server's wire if it is older than the SDK's; None for a server that speaks that.

    A server of the SDK's wire creates a training client by loading: asked for one of weights that
    are nowhere, it refuses the weights, or later the result. An older one misses a `model_id`. A
    server that refuses the key is not asked further, since the SDK is told so as well.
    httpx.HTTPError if it does not answer, ServiceError if it reads no datums.
    """
    kept = httpx.Limits(max_keepalive_connections=0)  # a server that fails closes its connection
    key_of = {"X-API-Key": key}
    with httpx.Client(base_url=url, headers=key_of, timeout=ASKING_SECONDS, limits=kept) as client:
        created = client.post(f"{API}load_weights", json=_creation())
        if created.status_code in KEY_REFUSED or not _is_older(created):
            return None
        return OlderWire(_ask_codec(client, url))


def _creation() -> dict[str, Any]:
    path = f"tinker://{NOBODY}:train:0/weights/none"
    return {"session_id": NOBODY, "model_seq_id": 0, "path": path, "optimizer": True}


def _is_older(answer: httpx.Response) -> bool:
    if answer.status_code in NO_ROUTE:
        return answer.status_code == 405 or answer.text == UNKNOWN_ROUTE
    return answer.status_code >= 400 and bool(re.search(r"\bmodel_id\b", answer.text))


def _ask_codec(client: httpx.Client, url: str) -> Codec:
    """Send a loss of a model that is nowhere, in both forms; return the one that is understood."""
    tokens = np.zeros(1, np.int32).tobytes()
    message = pb.ForwardBackwardRequest(model_id=NOBODY, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    for name, values in {"target_tokens": np.zeros(1, int), "weights": np.ones(1)}.items():
        datum.loss_fn_inputs[name].CopyFrom(encode_tensor(values))
    path = f"{API}forward_backward"
    sent = client.post(
        path, content=message.SerializeToString(), headers={"Content-Type": PROTOBUF}
    )
    if sent.status_code in UNDERSTOOD:
        return "protobuf"
    written = client.post(path, json=to_json(message))
    if written.status_code in UNDERSTOOD:
        return "json"
    raise ServiceError(
        f"the server at {url} reads datums neither in protobuf ({sent.status_code}) nor in JSON "
        f"({written.status_code}: {written.text[:200]}); it serves no training, or another API"
    )
