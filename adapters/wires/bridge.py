"""A server of the SDK's wire that asks a server of an older one."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal
from urllib.parse import quote, unquote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.wires.older_server import (
    API,
    JSON_HEADERS,
    NO_ROUTE,
    POLL_SECONDS,
    PROTOBUF,
    UNREADABLE,
    CallRefused,
    LoadedModels,
    OlderServer,
    failed,
    not_yet,
    passed,
)
from ratchet.durable.wire.datums import check_older, to_json
from ratchet.durable.wire.tensors import Malformed

LARGEST_DATUMS = 2**26
"""Bytes of a request with datums, which the SDK sends in chunks of 5 MB."""
LARGEST_CALL = 2**22
"""Bytes of any other request."""
HOP = {
    "host", "content-length", "connection", "accept-encoding", "transfer-encoding", "expect",
    "x-api-key", "content-type",
}  # fmt: skip
"""Headers of one connection, or that the bridge sets itself."""
OLDER_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,  # an older server takes requests in the order of arrival
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "sample_max_concurrent_requests": 256,  # each holds a connection here and one there
}
"""What the SDK shall leave to itself, since an older server has no calls for it."""

Call = Callable[[bytes, Mapping[str, str]], Awaitable[Response]]
Codec = Literal["protobuf", "json"]
"""The form of datums in a wire from before a training client was created by loading."""
SDK_OF: Mapping[Codec, str] = {"protobuf": "0.25", "json": "0.24"}
"""The newest SDK that certainly speaks a wire of this form."""


def never(_: Any) -> bool:
    """Tell that a field can be left out: it is a label, or asks for less than is given."""
    return False


def other_than_adam(config: Any) -> bool:
    return config not in (None, {"type": "adamw"})


NEWER: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
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
"""Call → its fields that came after SDK 0.25, and which values of each ask for something."""


def without_newer(call: str, body: Mapping[str, Any], form: Codec) -> dict[str, Any]:
    """Return a call's body without the newer fields; CallRefused for one that asks for something.

    A server may ignore what it does not know, so what it would be asked for is refused here.
    """
    newer = NEWER.get(call, {})
    for name, asks in newer.items():
        if name in body and asks(body[name]):
            raise CallRefused(
                f"{call} asks for {name} {body[name]!r:.100}, which the wire of this server (SDK "
                f"{SDK_OF[form]}) does not have; leave it out of the recipe, or use a server of a "
                "newer wire (docs/servers.md)"
            )
    return {name: value for name, value in body.items() if name not in newer}


class Bridge:
    """An ASGI application for the clients of one key, whose bodies it bounds."""

    def __init__(self, url: str, key: str, datums: Codec) -> None:
        self._url, self._key = url, key.encode()
        self._form: Codec = datums
        self._server = OlderServer(url, key)
        self._models = LoadedModels(self._server)
        self._calls: dict[str, Call] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "forward_backward": self._datums,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }

    async def end(self) -> None:
        """Unload what no session has unloaded."""
        await self._models.end_all()
        await self._server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), self._key):
            refused = "the X-API-Key is not that of the run whose bridge this is"
            await JSONResponse({"detail": refused}, 401)(scope, receive, send)
            return
        try:
            answer = await self._answer(request)
        except ClientDisconnect:
            return
        except (CallRefused, Malformed) as error:
            answer = JSONResponse({"detail": str(error)}, 400)
        except UNREADABLE as error:  # a status 500 would be repeated for minutes
            said = f"this call, or its answer, cannot be read: {type(error).__name__}: {error}"
            answer = JSONResponse({"detail": said}, 400)
        except httpx.TransportError as error:
            said = f"the server at {self._url} cannot be reached ({type(error).__name__}: {error})"
            answer = JSONResponse({"detail": said}, 503)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["raw_path"].decode("latin-1").partition("?")[0]
        call = path.removeprefix(API)
        body = await _bounded(
            request, LARGEST_DATUMS if call == "forward_backward" else LARGEST_CALL
        )
        headers = {k: v for k, v in request.headers.items() if k not in HOP}
        if request.method == "POST" and call in self._calls:
            return await self._calls[call](body, headers)
        if request.method == "POST" and call.startswith("sessions/") and call.endswith("/finish"):
            return await self._finish(path, body, headers)
        if request.method == "POST" and body:
            return passed(await self._send(call, _read(body), headers))
        path = "/".join(map(self._segment, path.split("/")))
        if query := request.url.query:
            path += f"?{query}"
        sent = JSON_HEADERS if body else {}
        return passed(await self._server.pass_on(request.method, path, body, {**headers, **sent}))

    def _segment(self, segment: str) -> str:
        """Return a part of a path, with the server's id for a model that has another one here."""
        named = unquote(segment)
        known = self._models.of(named).model_id
        return segment if known == named else quote(known, safe="")

    async def _send(
        self, call: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> httpx.Response:
        """Send a call without the fields that the server does not know, with its own ids."""
        older = self._models.renamed(without_newer(call, body, self._form))
        content = json.dumps(older).encode()
        return await self._server.pass_on("POST", API + call, content, {**headers, **JSON_HEADERS})

    async def _config(self, body: bytes, headers: Mapping[str, str]) -> Response:
        answer = await self._send("client/config", _read(body), headers)
        told = answer.json() if answer.is_success else {}
        return JSONResponse({**told, **OLDER_CONFIG})

    async def _dynamic_config(self, _: bytes, __: Mapping[str, str]) -> Response:
        return JSONResponse({"sample_cancel_enabled": False})

    async def _create_model(self, body: bytes, headers: Mapping[str, str]) -> Response:
        asked = without_newer("create_model", _read(body), self._form)
        return passed(await self._models.create(asked, {**headers, **JSON_HEADERS}))

    async def _load_weights(self, body: bytes, headers: Mapping[str, str]) -> Response:
        """Have a new training client created and loaded; a live one is loaded as it is."""
        asked = without_newer("load_weights", _read(body), self._form)
        if asked.get("session_id") is None:
            return passed(await self._send("load_weights", asked, headers))
        model_id = self._models.load(asked)
        return JSONResponse({"request_id": model_id, "model_id": model_id})

    async def _datums(self, body: bytes, headers: Mapping[str, str]) -> Response:
        message = pb.ForwardBackwardRequest.FromString(body)
        known = self._models.of(message.model_id)
        message.model_id = known.model_id
        if message.seq_id:
            message.seq_id += known.ahead
        call, sent = "forward_backward", {**headers, "Content-Type": PROTOBUF}
        if self._form == "json":
            content, sent = json.dumps(to_json(message)).encode(), {**headers, **JSON_HEADERS}
            call = "forward" if message.forward_only else call
        else:
            check_older(message)
            content = message.SerializeToString()
        answer = await self._server.pass_on("POST", API + call, content, sent)
        if answer.is_success:
            self._server.promise(str(answer.json()["request_id"]), None)
        return passed(answer)

    async def _sample(self, body: bytes, headers: Mapping[str, str]) -> Response:
        asked = _read(body)
        stop = asked["sampling_params"].get("stop")
        if isinstance(stop, str):  # which some servers read as a list alone
            asked["sampling_params"]["stop"] = [stop]
        answer = await self._send("asample", asked, headers)
        if not answer.is_success:
            return passed(answer)
        promised = answer.json()
        request_id = str(promised["request_id"])
        if asked.get("prompt_logprobs") or asked.get("topk_prompt_logprobs"):
            length = sum(len(chunk.get("tokens", ())) for chunk in asked["prompt"]["chunks"])
            self._server.promise(request_id, length)
        ids = [f"{request_id}:{number}" for number in range(asked.get("num_samples", 1))]
        return JSONResponse({"sample_sequence_ids": ids, **promised})

    async def _retrieve(self, body: bytes, headers: Mapping[str, str]) -> Response:
        asked = _read(body)
        request_id = str(asked["request_id"])
        loading = self._models.loading(request_id)
        if loading is None:
            return await self._server.poll(asked, headers)
        await asyncio.wait({loading}, timeout=POLL_SECONDS)
        if not loading.done():
            return not_yet(request_id)
        try:
            return JSONResponse(loading.result())
        except CallRefused as error:
            return failed(str(error), error.category)
        except (*UNREADABLE, httpx.TransportError) as error:
            return failed(f"{type(error).__name__}: {error}", "server")

    async def _finish(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """End a session; one of a server without that call ends with its models unloaded."""
        sent = {**headers, **JSON_HEADERS}
        answer = await self._server.pass_on("POST", path, body, sent)
        if answer.status_code not in NO_ROUTE:
            return passed(answer)
        await self._models.end(unquote(path.split("/")[-2]))
        return Response(status_code=204)


async def _bounded(request: Request, most: int) -> bytes:
    """Read a body of at most so many bytes; CallRefused beyond."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise CallRefused(f"the body has more than {most} bytes; send less at once")
        parts.append(part)
    return b"".join(parts)


def _read(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except ValueError as error:
        raise CallRefused(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CallRefused("the body is no JSON object")
    return found
