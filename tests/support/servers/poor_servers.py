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

from adapters.diagnosis.bench import RANK
from adapters.network.app_server import AppServer
from tests.support.servers.fault_proxy import HOP, answer_json, read_body

Body = dict[str, Any]


@dataclass
class PoorServer:
    """An engine behind a fault; `samples` has the requests of samples by the ids of their futures,
    and `ranks` the rank that each training client was asked for."""

    upstream: str
    fault: "Fault"
    url: str = ""
    samples: dict[str, Body] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
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
        content = self.fault.answer(self, endpoint, body, self._noted(endpoint, body, answer))
        kept = [(k, v) for k, v in answer.headers.raw if k.decode().lower() not in HOP]
        headers = [(k, v) for k, v in kept if k.decode().lower() != "content-encoding"]
        start = {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": content})

    def _noted(self, endpoint: str, body: bytes, answer: httpx.Response) -> bytes:
        if endpoint == "asample" and answer.is_success:
            self.samples[answer.json()["request_id"]] = json.loads(body)
        if endpoint == "create_model" and answer.is_success:
            asked = json.loads(body)
            client = f"{asked['session_id']}:train:{asked['model_seq_id']}"
            self.ranks[client] = asked["lora_config"]["rank"]
        return answer.content

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
    change: Callable[[PoorServer, Body], None]

    def request(self, server: PoorServer, endpoint: str, body: bytes) -> bytes:
        if endpoint not in self.endpoints:
            return body
        values = json.loads(body)
        self.change(server, values)
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


@dataclass
class Sampled(Fault):
    """Change of the log-probabilities of sampled tokens, by the request."""

    change: Callable[[np.ndarray, Body], np.ndarray]

    def answer(self, server: PoorServer, endpoint: str, asked: bytes, content: bytes) -> bytes:
        request = json.loads(asked).get("request_id") if endpoint == "retrieve_future" else None
        if request not in server.samples:
            return content
        message = pb.SampleResponse.FromString(content)
        for sequence in message.sequences:
            before = np.frombuffer(sequence.logprobs, np.float32)
            changed = self.change(before, server.samples[request]["sampling_params"])
            sequence.logprobs = changed.astype(np.float32).tobytes()
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


def _without(section: str, key: str, value: Any = None) -> Callable[[PoorServer, Body], None]:
    def change(_: PoorServer, body: Body) -> None:
        within = body[section] if section else body
        if value is None:
            within.pop(key, None)
        else:
            within[key] = value

    return change


def _grows_with_rank(server: PoorServer, body: Body) -> None:
    """Step as α = 2 · rank does in place of 32: its scale is that of gradients and of weights."""
    scale = server.ranks.get(body["model_id"], RANK) / 16
    body["adam_params"]["learning_rate"] *= scale
    body["adam_params"]["eps"] /= scale


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


def _in_bfloat16(logprobs: np.ndarray, _: Body) -> np.ndarray:
    bits = logprobs.view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32)


def _of_temperature(logprobs: np.ndarray, params: Body) -> np.ndarray:
    return logprobs / max(params["temperature"], 0.1)


def _without_prompts(_: PoorServer, body: Body) -> None:
    body.update(prompt_logprobs=False, topk_prompt_logprobs=0)
    body.pop("prompt_logprobs_last_n", None)


SAVES = ("save_weights", "save_weights_for_sampler")
FAULTS: Mapping[str, Fault] = {
    "ignores seeds": Asked(("asample",), _without("sampling_params", "seed")),
    "samples at temperature 0 as at 1": Asked(
        ("asample",),
        lambda _, body: body["sampling_params"].update(
            temperature=body["sampling_params"]["temperature"] or 1.0
        ),
    ),
    "drops top_k": Asked(("asample",), _without("sampling_params", "top_k")),
    "drops top_p": Asked(("asample",), _without("sampling_params", "top_p")),
    "ignores grad_clip_norm": Asked(("optim_step",), _without("adam_params", "grad_clip_norm", 0)),
    "has an α of twice the rank": Asked(("optim_step",), _grows_with_rank),
    "trains rank 16 whatever is asked": Asked(
        ("create_model",), _without("lora_config", "rank", 16)
    ),
    "flattens tables of targets": Passed(_flatten),
    "ignores the settings of losses": Passed(_without_settings),
    "loads no optimizer": Asked(("load_weights",), _without("", "optimizer", False)),
    "always loads the optimizer": Asked(("load_weights",), _without("", "optimizer", True)),
    "scores no prompts": Asked(("asample",), _without_prompts),
    "rounds log-probabilities to bfloat16": Sampled(_in_bfloat16),
    "gives log-probabilities of the temperature": Sampled(_of_temperature),
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
