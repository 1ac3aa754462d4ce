"""A server of an older wire: the calls to it, and its models.

What it refuses is brought into the SDK's categories. Its models are loaded, counted and unloaded.
"""

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from google.protobuf.message import DecodeError
from starlette.responses import JSONResponse, Response
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.network.answers import send_bounded
from ratchet.durable.wire.results import (
    add_loss,
    complete_prompt,
    losses_from_json,
    sample_from_json,
)

API = "/api/v1/"
PROTOBUF = "application/x-protobuf"
KEY_REFUSED = (401, 403)
NO_ROUTE = (404, 405)
UNKNOWN_ROUTE = '{"detail":"Not Found"}'
"""Answer of a FastAPI server that has no such call at all."""
CALL_SECONDS = 120.0
POLL_SECONDS = 40.0
"""Below the 45 s after which the SDK gives up a poll."""
CONNECTING_SECONDS = 10.0
FAILED = 500
"""Status of a server whose own program failed, as it will again: one of a proxy is 502 to 504."""
TRIES, PAUSE_SECONDS = 3, 0.5
TRIED_AGAIN = (408, 409, 425, 429)
MOST_PROMISES = 2**14
CATEGORIES = ("user", "server", "unknown")
UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, RecursionError, DecodeError)
"""What reading an answer raises that is not what it should be."""
SHAPE = ("train_unembed", "train_mlp", "train_attn")
LOADING = 1
"""Requests of a model created by loading that the server has counted, and the SDK has not."""
UNLOADING_SECONDS = 5.0


class CallRefused(Exception):
    """A call that an older server cannot carry out, or one that it has refused for good."""

    def __init__(self, text: str, category: str = "user") -> None:
        super().__init__(text)
        self.category = category
        """Whom the SDK blames: the user, the server, or nobody (unknown)."""


class OlderServer:
    """The client of a server, and what it has promised."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url.rstrip("/"), {"X-API-Key": key}
        self._client = httpx.AsyncClient(limits=httpx.Limits())
        self._promises: OrderedDict[str, int | None] = OrderedDict()
        """Tokens of the prompts whose log-probabilities are promised; None for results of datums.
        """
        self._failures: Counter[str] = Counter()

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        seconds: float = CALL_SECONDS,
    ) -> httpx.Response:
        """Send a request, and read its answer; httpx.TransportError if none comes."""
        waiting = httpx.Timeout(seconds, connect=CONNECTING_SECONDS)
        sent = {**headers, **self._headers}
        request = self._client.build_request(
            method, f"{self._url}{path}", content=body, headers=sent, timeout=waiting
        )
        return await send_bounded(self._client, request)

    async def pass_on(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Send a call as it is; one at which the server fails each time is refused (CallRefused).

        The SDK would repeat it for minutes.
        """
        said_last = ""
        for _ in range(TRIES):
            answer = await self._ask(method, path, body, headers)
            if answer.status_code != FAILED:
                return answer
            said_last = said(answer)
            await asyncio.sleep(PAUSE_SECONDS)
        raise CallRefused(f"the server failed {TRIES} times at {path}: {said_last}")

    async def ask(self, call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the server answers to a call at once; CallRefused if it refuses."""
        content = json.dumps(body).encode()
        answer = await self.pass_on("POST", f"{API}{call}", content, JSON_HEADERS)
        if not answer.is_success:
            passing = answer.status_code in TRIED_AGAIN or answer.status_code >= FAILED
            category = "server" if passing else "user"
            raise CallRefused(f"{call} ({answer.status_code}): {said(answer)}", category)
        found = answer.json()
        return found if isinstance(found, dict) else {}

    async def result(self, request_id: str) -> dict[str, Any]:
        """Wait for a promised result in JSON; CallRefused if the server says that it failed."""
        while True:
            answer = await self.poll({"request_id": request_id}, {})
            found = json.loads(bytes(answer.body))
            if answer.status_code == 200 and "error" in found:
                raise CallRefused(found["error"], found["category"])
            if answer.status_code == 200 and found.get("type") != "try_again":
                return found
            if answer.status_code not in (200, 408):
                raise CallRefused(f"{found.get('detail', found)}", "server")

    def promise(self, request_id: str, prompt: int | None) -> None:
        self._promises[request_id] = prompt
        while len(self._promises) > MOST_PROMISES:
            self._promises.popitem(last=False)

    async def poll(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        """Return a promised result, or that it is not yet there, as the SDK reads it."""
        request_id = str(asked["request_id"])
        content = json.dumps({**asked, "request_id": request_id}).encode()
        sent = {**headers, **JSON_HEADERS}
        try:
            answer = await self._ask("POST", f"{API}retrieve_future", content, sent, POLL_SECONDS)
        except httpx.ReadTimeout:
            return not_yet(request_id)
        if answer.status_code == 200:
            self._failures.pop(request_id, None)
            return self._read(request_id, answer)
        return self._read_refusal(request_id, answer)

    def _read(self, request_id: str, answer: httpx.Response) -> Response:
        prompt, body = self._promises.get(request_id), answer.content
        try:
            if PROTOBUF in answer.headers.get("Content-Type", ""):
                known = request_id in self._promises
                return Response(_mended(body, prompt) if known else body, media_type=PROTOBUF)
            found = json.loads(body)
            if "sequences" in found:
                message = sample_from_json(found)
                return Response(_completed(message, prompt), media_type=PROTOBUF)
            if "loss_fn_outputs" in found:
                losses = losses_from_json(found)
                add_loss(losses)
                return Response(losses.SerializeToString(), media_type=PROTOBUF)
            if "error" in found:
                category = found.get("category")
                known = category if category in CATEGORIES else "unknown"
                return JSONResponse({**found, "category": known})
            return JSONResponse(_of_three_segments(found))
        except UNREADABLE as error:
            return failed(f"the server's answer cannot be read: {error}", "server")

    def _read_refusal(self, request_id: str, answer: httpx.Response) -> Response:
        """Bring a status into what the SDK takes for final, or for passing, as it is one of them.

        An older server says by a 400 that a request failed, which the SDK takes for a proxy's.
        """
        status = answer.status_code
        if status == 408:
            return not_yet(request_id)
        if status == 404:
            return JSONResponse({"detail": said(answer)}, 410)
        if status == FAILED:
            self._failures[request_id] += 1
            if self._failures[request_id] >= TRIES:
                del self._failures[request_id]
                return failed(said(answer), "server")
        if 400 <= status < FAILED and status not in (*KEY_REFUSED, *TRIED_AGAIN, 402, 410):
            return failed(said(answer), "user")
        return passed(answer)


JSON_HEADERS = {"Content-Type": "application/json"}


def _mended(body: bytes, prompt: int | None) -> bytes:
    """Complete an answer in protobuf, which lacks a metric or a place."""
    if prompt is not None:
        return _completed(pb.SampleResponse.FromString(body), prompt)
    losses = pb.ForwardBackwardOutput.FromString(body)
    add_loss(losses)
    return losses.SerializeToString()


def _completed(message: Any, prompt: int | None) -> bytes:
    if prompt is not None:
        complete_prompt(message, prompt)
    return message.SerializeToString()


def _of_three_segments(found: dict[str, Any]) -> dict[str, Any]:
    """Write a sampler's path, which some servers write as tinker://MODEL/NAME, as the SDK reads it.

    Those servers read it with three segments too.
    """
    path = found.get("path")
    if isinstance(path, str) and path.startswith("tinker://") and path.count("/") == 3:
        model, _, name = path.removeprefix("tinker://").partition("/")
        return {**found, "path": f"tinker://{model}/sampler_weights/{name}"}
    return found


def said(answer: httpx.Response) -> str:
    """Return what a server says of a refusal, in a line."""
    text = answer.content.decode(errors="replace")
    try:
        detail = answer.json().get("detail")
    except (AttributeError, ValueError):
        detail = text
    if text == UNKNOWN_ROUTE:
        return f"this server has no call {answer.url.path}"
    return str(detail or answer.reason_phrase)[:2000]


def passed(answer: httpx.Response) -> Response:
    """Return a server's answer as it is, with its refusal in a line."""
    if answer.status_code < 400:
        body = b"" if answer.status_code == 204 else answer.content
        return Response(body, answer.status_code, media_type=answer.headers.get("Content-Type"))
    after = answer.headers.get("Retry-After")
    headers = {"retry-after": after} if after else None
    return JSONResponse({"detail": said(answer)}, answer.status_code, headers)


def not_yet(request_id: str) -> Response:
    pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return JSONResponse(pending, 408)


def failed(text: str, category: str) -> Response:
    return JSONResponse({"error": text, "category": category})


@dataclass(frozen=True)
class Known:
    """A model as the server calls it, and by how much its numbers of requests are ahead."""

    model_id: str
    ahead: int = 0


class LoadedModels:
    """The models of each session, and the server's names of those whose ids the SDK computes."""

    def __init__(self, server: OlderServer) -> None:
        self._server = server
        self._known: dict[str, Known] = {}
        self._of_sessions: dict[str, list[str]] = {}
        self._begun: dict[tuple[str, int], asyncio.Task[dict[str, Any]]] = {}
        self._creating: dict[tuple[str, int], asyncio.Task[httpx.Response]] = {}
        self._noting: set[asyncio.Task[None]] = set()

    def of(self, model_id: str) -> Known:
        """Return the model that the SDK calls by an id."""
        return self._known.get(model_id) or Known(model_id)

    def renamed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's body with the server's id of the model, and its number of the request."""
        named = body.get("model_id")
        if named is None:
            return {**body}
        known = self.of(named)
        changed: dict[str, Any] = {"model_id": known.model_id}
        if body.get("seq_id") is not None:
            changed["seq_id"] = body["seq_id"] + known.ahead
        return {**body, **changed}

    async def create(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """Create a model, once if asked twice; return the server's promise."""
        key = str(asked["session_id"]), int(asked["model_seq_id"])
        creating = self._creating.get(key)
        if creating is None:
            creating = self._creating[key] = asyncio.create_task(self._create(asked, headers))
        try:
            answer = await asyncio.shield(creating)
        except (CallRefused, httpx.TransportError):
            self._creating.pop(key, None)
            raise
        if not answer.is_success:
            self._creating.pop(key, None)  # which may succeed later
        return answer

    def load(self, asked: Mapping[str, Any]) -> str:
        """Begin to create a model by loading, once; return its id, by which `loading` is found."""
        session, number = str(asked["session_id"]), int(asked["model_seq_id"])
        model_id = f"{session}:train:{number}"
        begun = self._begun.get((session, number))
        if begun is None:
            self._begun[session, number] = asyncio.create_task(self._load(asked, model_id))
        return model_id

    def loading(self, request_id: str) -> asyncio.Task[dict[str, Any]] | None:
        """Return the loading that is waited for; None for a result of the server's."""
        session, _, number = request_id.partition(":train:")
        return self._begun.get((session, int(number))) if number.isdecimal() else None

    async def _create(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        content = json.dumps(asked).encode()
        answer = await self._server.pass_on("POST", f"{API}create_model", content, headers)
        if answer.is_success:
            noting = asyncio.create_task(self._note(str(asked["session_id"]), answer.json()))
            self._noting.add(noting)
            noting.add_done_callback(self._noting.discard)
        return answer

    async def _note(self, session: str, promised: Mapping[str, Any]) -> None:
        """Note a model, whose id the server tells at once or with the result."""
        with suppress(CallRefused, httpx.TransportError, KeyError):
            created = promised
            if not promised.get("model_id"):
                created = await self._server.result(str(promised["request_id"]))
            self._hold(session, created["model_id"])

    async def _load(self, asked: Mapping[str, Any], model_id: str) -> dict[str, Any]:
        """Create a model of the shape of saved weights, and load them as its first request."""
        session, path = str(asked["session_id"]), asked["path"]
        shape = await self._server.ask("weights_info", {"tinker_path": path})
        if not shape.get("lora_rank"):
            raise CallRefused(f"the server does not say which LoRA rank {path} has")
        promised = await self._server.ask(
            "create_model",
            {
                "session_id": session,
                "model_seq_id": asked["model_seq_id"],
                "base_model": asked.get("base_model") or shape["base_model"],
                "user_metadata": asked.get("user_metadata"),
                "lora_config": {
                    "rank": shape["lora_rank"],
                    **{name: shape[name] for name in SHAPE if shape.get(name) is not None},
                },
                "type": "create_model",
            },
        )
        created = await self._server.result(str(promised["request_id"]))
        own = promised.get("model_id") or created["model_id"]
        self._hold(session, own)
        load = {"model_id": own, "path": path, "optimizer": asked["optimizer"], "seq_id": LOADING}
        try:
            loading = await self._server.ask("load_weights", {**load, "type": "load_weights"})
            await self._server.result(str(loading["request_id"]))
        except CallRefused:
            await self._unload(session, own)
            raise
        self._known[model_id] = Known(own, LOADING)
        return {"type": "load_weights", "path": path, "model_id": model_id}

    def _hold(self, session: str, model_id: str) -> None:
        held = self._of_sessions.setdefault(session, [])
        if model_id not in held:
            held.append(model_id)

    async def end(self, session: str) -> None:
        """Unload the models of a session, whose places the server gives to others."""
        for model_id in [*self._of_sessions.get(session, ())]:
            await self._unload(session, model_id)
        self._of_sessions.pop(session, None)

    async def end_all(self) -> None:
        """Unload all models, as far as that can be done within UNLOADING_SECONDS."""
        ending = asyncio.gather(*map(self.end, [*self._of_sessions]), return_exceptions=True)
        await asyncio.wait({ending}, timeout=UNLOADING_SECONDS)

    async def _unload(self, session: str, model_id: str) -> None:
        """Unload a model, and wait a while until it is gone if the server promises that."""
        unload = {"model_id": model_id, "type": "unload_model"}
        try:
            promised = await self._server.ask("unload_model", unload)
            if promised.get("request_id"):
                gone = self._server.result(str(promised["request_id"]))
                await asyncio.wait_for(gone, UNLOADING_SECONDS)
        except (CallRefused, TimeoutError):
            return  # it has no such call, has forgotten the model, or is busy
        self._of_sessions[session].remove(model_id)
