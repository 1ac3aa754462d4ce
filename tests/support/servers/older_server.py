"""A server of an older wire: a real engine, behind what SkyRL and TuFT say and do not know."""

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

import httpx
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.network.app_server import AppServer
from ratchet.durable.wire.datums import BACKWARD, FORWARD, TOKENS
from ratchet.durable.wire.results import FLOAT, INTEGER, LOSS, NO_LOGPROB, STOPPED, decode_losses
from ratchet.durable.wire.tensors import (
    Malformed,
    encode_tensor,
    locating,
    read_array,
    read_json,
    write_json,
)

API = "/api/v1/"
PROTOBUF = "application/x-protobuf"
FIELDS = {
    "create_session": "tags user_metadata sdk_version project_id type",
    "create_model": "session_id model_seq_id base_model user_metadata lora_config type",
    "load_weights": "model_id seq_id session_id model_seq_id base_model user_metadata path"
    " optimizer weights_access_token type",
    "optim_step": "adam_params model_id seq_id type",
    "save_weights": "model_id path seq_id ttl_seconds overwrite type",
    "save_weights_for_sampler": "model_id path sampling_session_seq_id seq_id ttl_seconds type",
    "asample": "num_samples prompt sampling_params base_model model_path sampling_session_id seq_id"
    " prompt_logprobs topk_prompt_logprobs type",
}
"""Call → the fields that SDK 0.24 and 0.25 have for it; a server may refuse any other."""
COUNTED = (
    *("forward", "forward_backward", "optim_step", "load_weights", "save_weights"),
    "save_weights_for_sampler",
)
"""Calls of a model that are numbered, from 1 on, without a gap."""
NEWER = ("save_weights_external", "create_custom_loss", "client/dynamic_config")
"""Calls that came later, beside the end of a session."""
HOP = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}


@dataclass
class OlderServer:
    """An ASGI application; `seen` counts its calls, `live` is the models that hold a slot."""

    upstream: str
    datums: Literal["json", "protobuf"] = "json"
    slots: int = 16
    url: str = ""
    seen: Counter[str] = field(default_factory=Counter)
    live: set[str] = field(default_factory=set)
    broken: str = ""
    """A call at which the server's own program fails."""
    _ours: dict[str, str] = field(default_factory=dict)
    """The engine's id of a model → the one that is told."""
    _counted: Counter[str] = field(default_factory=Counter)
    _asked: dict[str, str] = field(default_factory=dict)
    """Id of a promised result → its call."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = await self._answer(request, await request.body())
        await answer(scope, receive, send)

    async def _answer(self, request: Request, body: bytes) -> Response:
        call = request.url.path.removeprefix(API)
        self.seen[call] += 1
        if call == self.broken:
            return refusal(500, "Internal Server Error")
        if call.endswith("/finish") or call in NEWER:
            return refusal(404, "Not Found")
        if call in ("forward_backward", "forward"):
            return await self._datums(request, call, body)
        if request.method != "POST":
            return await self._pass(request, call, body)
        asked = json.loads(body)
        unknown = asked.keys() - FIELDS.get(call, " ".join(asked)).split()
        if unknown:
            return refusal(422, [{"loc": ["body", *unknown], "msg": "Extra inputs are forbidden"}])
        if call == "unload_model":
            return self._unload(asked)
        if call == "load_weights" and "model_id" not in asked:
            return refusal(422, [{"loc": ["body", "model_id"], "msg": "Field required"}])
        if call == "load_weights" and self._counted[asked["model_id"]]:
            return refusal(400, "LoadWeights is not permitted with this seq_id")
        if call == "create_model" and len(self.live) >= self.slots:
            return refusal(400, f"Maximum number of LoRA adapters ({self.slots}) reached")
        if gap := self._count(call, asked.get("model_id"), asked.get("seq_id")):
            return gap
        return await self._pass(request, call, self._inward(body), asked)

    def _count(self, call: str, model: str | None, number: int | None) -> Response | None:
        if call not in COUNTED:
            return None
        if model not in self.live:
            return refusal(404, "Model not found")
        if number != self._counted[model] + 1:
            return refusal(409, f"request {number} after {self._counted[model]}")
        self._counted[model] += 1
        return None

    async def _datums(self, request: Request, call: str, body: bytes) -> Response:
        media = request.headers.get("content-type", "")
        if self.datums == "json":
            if "json" not in media:
                raise UnicodeError("the body is protobuf")  # SkyRL 0.3.0 answers so: 500, closed
            message = from_json(json.loads(body))
        elif PROTOBUF not in media:
            return refusal(415, "Unsupported Content-Type")
        else:
            message = pb.ForwardBackwardRequest.FromString(body)
        if gap := self._count(call, message.model_id, message.seq_id):
            return gap
        message.model_id = self.engines_name(message.model_id)
        headers = {"content-type": PROTOBUF}
        return await self._pass(
            request, "forward_backward", message.SerializeToString(), None, headers
        )

    def engines_name(self, model: str) -> str:
        """Return the engine's id of a model."""
        return next((theirs for theirs, ours in self._ours.items() if ours == model), model)

    def _inward(self, body: bytes) -> bytes:
        for theirs, ours in self._ours.items():
            body = body.replace(ours.encode(), theirs.encode())
        return body

    def _outward(self, body: bytes) -> bytes:
        for theirs, ours in self._ours.items():
            body = body.replace(theirs.encode(), ours.encode())
        return body

    def _unload(self, asked: Mapping[str, Any]) -> Response:
        self.live.discard(asked["model_id"])
        return JSONResponse({"request_id": "unloaded", "model_id": asked["model_id"]})

    async def _pass(
        self,
        request: Request,
        call: str,
        body: bytes,
        asked: Mapping[str, Any] | None = None,
        changed: Mapping[str, str] | None = None,
    ) -> Response:
        headers = {k: v for k, v in request.headers.items() if k not in HOP} | {**(changed or {})}
        path = self._inward(f"{API}{call}".encode()).decode()
        async with httpx.AsyncClient(base_url=self.upstream, timeout=60) as client:
            answer = await client.request(
                request.method, path, content=body, headers=headers, params=request.query_params
            )
        if call == "retrieve_future":
            return self._result(str((asked or {})["request_id"]), answer)
        if call == "create_model" and answer.is_success:
            self._ours[answer.json()["model_id"]] = made = f"model_{uuid4().hex[:8]}"
            self.live.add(made)
        if not answer.is_success or not answer.content:
            return Response(answer.content, answer.status_code, media_type="application/json")
        told = json.loads(self._outward(answer.content))
        if call == "asample":
            del told["sample_sequence_ids"]
        if "request_id" in told:
            self._asked[told["request_id"]] = call
        return JSONResponse(told, answer.status_code)

    def _result(self, request_id: str, answer: httpx.Response) -> Response:
        if answer.status_code == 408:
            return refusal(408, "Timeout waiting for result")
        call, body = self._asked.get(request_id), answer.content
        if PROTOBUF not in answer.headers["content-type"]:
            found = json.loads(self._outward(body))
            if "error" in found:
                return refusal(400, found["error"])
            if call == "save_weights_for_sampler" and found.get("path"):
                found["path"] = found["path"].replace("/sampler_weights/", "/")
            return JSONResponse(found, answer.status_code)
        if call == "asample":
            return self._sample(body)
        losses = pb.ForwardBackwardOutput.FromString(body)
        del losses.metrics[LOSS]
        if self.datums == "json":
            return JSONResponse(losses_to_json(losses))
        return Response(losses.SerializeToString(), media_type=PROTOBUF)

    def _sample(self, body: bytes) -> Response:
        message = pb.SampleResponse.FromString(body)
        message.prompt_logprobs = message.prompt_logprobs[4:]  # the first token has no score
        if self.datums == "protobuf":
            return Response(message.SerializeToString(), media_type=PROTOBUF)
        return JSONResponse(sample_to_json(message))


def refusal(status: int, detail: object) -> JSONResponse:
    return JSONResponse({"detail": detail}, status)


@contextmanager
def older(upstream: str, **how: Any) -> Iterator[OlderServer]:
    """Serve an older wire before the engine at `upstream`, in a thread."""
    served = OlderServer(upstream, **how)
    server = AppServer(served)
    served.url = server.url
    server.start()
    try:
        yield served
    finally:
        server.stop()


def from_json(body: Mapping[str, Any]) -> pb.ForwardBackwardRequest:
    """Read the body of `forward` or of `forward_backward` in JSON."""
    forward = FORWARD in body
    given = body[FORWARD if forward else BACKWARD]
    config = given.get("loss_fn_config") or {}
    message = pb.ForwardBackwardRequest(
        model_id=body["model_id"],
        seq_id=body.get("seq_id") or 0,
        loss_fn=given["loss_fn"],
        loss_fn_config=config,
        forward_only=forward,
    )
    for name, value in config.items():
        message.loss_fn_config_v2[name].number = value
    for position, datum in enumerate(given["data"]):
        with locating(f"datum {position}"):
            _datum_from_json(message.data.add(), datum)
    return message


def _datum_from_json(written: pb.Datum, datum: Mapping[str, Any]) -> None:
    for chunk in datum["model_input"]["chunks"]:
        made = written.model_input.add()
        if "tokens" in chunk:
            made.encoded_text.tokens = np.array(chunk["tokens"], TOKENS).tobytes()
        elif "data" in chunk:
            made.image.data = base64.b64decode(chunk["data"])
            made.image.format = chunk["format"]
            if chunk.get("expected_tokens") is not None:
                made.image.expected_tokens = chunk["expected_tokens"]
        else:
            raise Malformed(f"a chunk holds {chunk.get('type')!r}; send text or images")
    for name, tensor in datum["loss_fn_inputs"].items():
        with locating(f"loss_fn_inputs[{name!r}]"):
            written.loss_fn_inputs[name].CopyFrom(encode_tensor(read_json(tensor)))


def losses_to_json(message: pb.ForwardBackwardOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: write_json(array) for name, array in fields.items()}
            for fields in decode_losses(message)
        ],
        "metrics": dict(message.metrics),
    }


def sample_to_json(message: pb.SampleResponse) -> dict[str, Any]:
    names = {number: name for name, number in STOPPED.items()}
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": names[one.stop_reason],
                "tokens": read_array(one.tokens, INTEGER).tolist(),
                "logprobs": read_array(one.logprobs, FLOAT).tolist(),
            }
            for one in message.sequences
        ],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.prompt_logprobs:
        scores = read_array(message.prompt_logprobs, FLOAT)
        answer["prompt_logprobs"] = [None if np.isnan(s) else float(s) for s in scores]
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _rows(message.topk_prompt_logprobs)
    return answer


def _rows(table: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    shape = (table.length, table.k)
    ids = read_array(table.token_ids, INTEGER).reshape(shape)
    scores = read_array(table.logprobs, FLOAT).reshape(shape)
    cells = [
        [(int(i), float(s)) for i, s in zip(*row, strict=True) if s != np.float32(NO_LOGPROB)]
        for row in zip(ids, scores, strict=True)
    ]
    return [row or None for row in cells]
