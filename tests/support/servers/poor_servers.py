"""Servers of the Tinker API with one fault each: a proxy that alters what an engine is asked."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from starlette.types import Receive, Scope, Send
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.network.app_server import AppServer
from tests.support.servers.fault_proxy import HOP, answer_json, read_body

Body = dict[str, Any]


@dataclass
class PoorServer:
    """An engine behind a fault; `samples` has the ids of the futures of samples."""

    upstream: str
    fault: "Fault"
    url: str = ""
    samples: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    """Endpoints in the order of their requests."""
    _client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, body = scope["path"].rpartition("/")[2], await read_body(receive)
        self.asked.append(endpoint)
        if (said := self.fault.instead(scope["path"], body)) is not None:
            await answer_json(send, *said)
            return
        asked = self.fault.request(self, endpoint, body)
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=60)
        answer = await self._client.request(
            scope["method"],
            f"{self.upstream}{scope['path']}?{scope['query_string'].decode()}",
            content=asked,
            headers=[(k, v) for k, v in scope["headers"] if k.decode().lower() not in HOP],
        )
        if endpoint == "asample" and answer.is_success:
            self.samples.add(answer.json()["request_id"])
        content = self.fault.answer(self, endpoint, body, answer.content)
        kept = [(k, v) for k, v in answer.headers.raw if k.decode().lower() not in HOP]
        headers = [(k, v) for k, v in kept if k.decode().lower() != "content-encoding"]
        start = {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": content})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class Fault:
    """No fault; each other one changes what is asked, or what is answered."""

    def instead(self, path: str, body: bytes) -> tuple[int, Body] | None:
        """Return the status and the answer to a request that the engine never sees."""
        return None

    def request(self, server: PoorServer, endpoint: str, body: bytes) -> bytes:
        return body

    def answer(self, server: PoorServer, endpoint: str, asked: bytes, content: bytes) -> bytes:
        return content


@dataclass
class Asked(Fault):
    """Change of the JSON of requests to some endpoints."""

    endpoints: tuple[str, ...]
    change: Callable[[Body], None]

    def request(self, server: PoorServer, endpoint: str, body: bytes) -> bytes:
        if endpoint not in self.endpoints:
            return body
        values = json.loads(body)
        self.change(values)
        return json.dumps(values).encode()


@dataclass
class Passed(Fault):
    """Change of the message of forward and backward passes."""

    change: Callable[[pb.ForwardBackwardRequest], None]

    def request(self, server: PoorServer, endpoint: str, body: bytes) -> bytes:
        if endpoint != "forward_backward":
            return body
        message = pb.ForwardBackwardRequest.FromString(body)
        self.change(message)
        return message.SerializeToString()


class Rounded(Fault):
    """Log-probabilities of sampled tokens in bfloat16."""

    def answer(self, server: PoorServer, endpoint: str, asked: bytes, content: bytes) -> bytes:
        request = json.loads(asked).get("request_id") if endpoint == "retrieve_future" else None
        if request not in server.samples:
            return content
        message = pb.SampleResponse.FromString(content)
        for sequence in message.sequences:
            bits = np.frombuffer(sequence.logprobs, np.uint32)
            sequence.logprobs = ((bits + 0x8000) & 0xFFFF0000).tobytes()
        return message.SerializeToString()


class WithoutIds(Fault):
    """Promises of samples that do not name their sequences, as before SDK 0.26."""

    def answer(self, server: PoorServer, endpoint: str, asked: bytes, content: bytes) -> bytes:
        if endpoint != "asample":
            return content
        promise = json.loads(content)
        promise.pop("sample_sequence_ids", None)
        return json.dumps(promise).encode()


@dataclass
class Unfinished(Fault):
    """Sessions that do not end: the request is refused, or is taken and does nothing."""

    status: int

    def instead(self, path: str, body: bytes) -> tuple[int, Body] | None:
        return (self.status, {"detail": "Not Found"}) if path.endswith("/finish") else None


@dataclass
class Forgetful(Fault):
    """Saved weights that are sampled only until the session that saved them ends."""

    ended: set[str] = field(default_factory=set)
    weights: dict[str, str] = field(default_factory=dict)
    """Sampling session → path of its weights, which begins with the session that saved them."""

    def instead(self, path: str, body: bytes) -> tuple[int, Body] | None:
        if path.endswith("/finish"):
            self.ended.add(path.split("/")[-2])
        if path.endswith("/asample"):
            weights = self.weights.get(json.loads(body)["sampling_session_id"], "")
            if weights.removeprefix("tinker://").partition(":")[0] in self.ended:
                return 404, {"detail": "the model is not loaded"}
        return None

    def answer(self, server: PoorServer, endpoint: str, asked: bytes, content: bytes) -> bytes:
        if endpoint == "create_sampling_session":
            opened = json.loads(content).get("sampling_session_id", "")
            self.weights[opened] = json.loads(asked).get("model_path") or ""
        return content


def _without(section: str, key: str, value: Any = None) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        within = body[section] if section else body
        if value is None:
            within.pop(key, None)
        else:
            within[key] = value

    return change


def _flatten(message: pb.ForwardBackwardRequest) -> None:
    """Take the first N of the N · K numbers of a table, as a server does that reads no shapes."""
    for one in message.data:
        for tensor in one.loss_fn_inputs.values():
            if len(tensor.shape) == 2:
                rows, columns = tensor.shape
                size = len(tensor.dense) // (rows * columns)
                tensor.dense = tensor.dense[: rows * size]
                tensor.ClearField("shape")
                tensor.shape.append(rows)


def _without_settings(message: pb.ForwardBackwardRequest) -> None:
    message.ClearField("loss_fn_config")
    message.ClearField("loss_fn_config_v2")


def _without_prompts(body: Body) -> None:
    body.update(prompt_logprobs=False, topk_prompt_logprobs=0)
    body.pop("prompt_logprobs_last_n", None)


SAVES = ("save_weights", "save_weights_for_sampler")
FAULTS: Mapping[str, Fault] = {
    "ignores seeds": Asked(("asample",), _without("sampling_params", "seed")),
    "ignores grad_clip_norm": Asked(("optim_step",), _without("adam_params", "grad_clip_norm", 0)),
    "flattens tables of targets": Passed(_flatten),
    "ignores the settings of losses": Passed(_without_settings),
    "loads no optimizer": Asked(("load_weights",), _without("", "optimizer", False)),
    "always loads the optimizer": Asked(("load_weights",), _without("", "optimizer", True)),
    "scores no prompts": Asked(("asample",), _without_prompts),
    "rounds log-probabilities to bfloat16": Rounded(),
    "ignores ttl_seconds": Asked(SAVES, _without("", "ttl_seconds")),
    "takes the end of a session and keeps its clients": Unfinished(200),
    "knows no end of a session": Unfinished(404),
    "names no sampled sequences": WithoutIds(),
    "forgets weights with their session": Forgetful(),
}
"""A server's fault, in words → the fault."""


@contextmanager
def poor_server(upstream: str, fault: Fault) -> Iterator[PoorServer]:
    """Serve an engine with a fault, in a thread."""
    poor = PoorServer(upstream, fault)
    server = AppServer(poor)
    poor.url = f"http://127.0.0.1:{server.port}"
    server.start()
    try:
        yield poor
    finally:
        server.loop.call_soon_threadsafe(lambda: server.loop.create_task(poor.close()))
        server.stop()
