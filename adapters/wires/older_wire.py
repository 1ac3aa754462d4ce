"""A wire older than the SDK's: how a server is asked for its wire, and the fields that it lacks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.errors import ServiceError
from ratchet.durable.wire.datums import to_json
from ratchet.durable.wire.tensors import encode_tensor

Codec = Literal["protobuf", "json"]
Says = Callable[[Any], bool]
"""Whether a field's value asks for something that no server does of itself."""

API = "/api/v1/"
PROTOBUF = "application/x-protobuf"
NOBODY = "ratchet-asks"
"""Name of a session and a model that no server has, so that the calls change nothing."""
CREATION = {
    "session_id": NOBODY,
    "model_seq_id": 0,
    "path": f"tinker://{NOBODY}:train:0/weights/none",
    "optimizer": True,
}
"""A training client that is to be created by loading."""
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
        created = client.post(f"{API}load_weights", json=CREATION)
        if created.status_code in KEY_REFUSED or not _is_older(created):
            return None
        return OlderWire(_ask_codec(client, url))


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


class CallRefused(Exception):
    """A call that an older server cannot carry out, or one that it has refused for good."""

    def __init__(self, text: str, category: str = "user") -> None:
        super().__init__(text)
        self.category = category
        """Whom the SDK blames: the user, the server, or nobody (unknown)."""


def never(_: Any) -> bool:
    """Tell that a field can be left out: it is a label, or asks for less than is given."""
    return False


def other_than_adam(config: Any) -> bool:
    return config not in (None, {"type": "adamw"})


NEWER: Mapping[str, Mapping[str, Says]] = {
    "create_session": {"display_name": never},
    "create_model": {"optimizer_config": other_than_adam},
    "load_weights": {"optimizer_config": other_than_adam},
    "optim_step": {"optimizer_params": bool},
    "save_weights": {"user_metadata": bool},
    "save_weights_for_sampler": {
        "user_metadata": bool,
        "kind": lambda kind: kind not in (None, "snapshot"),
    },
    "asample": {
        "topk_sample_logprobs": bool,
        "target_prompt_logprobs": bool,
        "prompt_alt_tokens_k": bool,
        "prompt_logprobs_last_n": never,  # an older server scores all tokens
        "record_stability_info": bool,
    },
}
"""Call → its fields that came after SDK 0.25, and what each asks for."""


def without_newer(call: str, body: Mapping[str, Any], wire: OlderWire) -> dict[str, Any]:
    """Return a call's body without the newer fields; CallRefused for one that asks for something.

    A server may ignore what it does not know, so what it would be asked for is refused here.
    """
    newer = NEWER.get(call, {})
    for name, asks in newer.items():
        if name in body and asks(body[name]):
            raise CallRefused(
                f"{call} asks for {name} {body[name]!r:.100}, which the wire of this server (SDK "
                f"{wire.sdk}) does not have; leave it out of the recipe, or use a server of a "
                "newer wire (docs/servers.md)"
            )
    return {name: value for name, value in body.items() if name not in newer}
