"""Training clients of an older server: created by loading, counted, and unloaded in the end."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from ratchet.adapters.wires.asking import API
from ratchet.adapters.wires.fields import CallRefused
from ratchet.adapters.wires.older_server import Answer, OlderServer

SHAPE = ("train_unembed", "train_mlp", "train_attn")
LOADING = 1
"""Requests of a model created by loading that the server has counted, and the SDK has not."""
UNLOADING_SECONDS = 5.0


@dataclass(frozen=True)
class Known:
    """A model as the server calls it, and by how much its numbers of requests are ahead."""

    model_id: str
    ahead: int = 0


class LoadedModels:
    """The models of each session, and the server's names of those that were created by loading.

    The SDK computes the id of such a model, and an older server gives it another one.
    """

    def __init__(self, server: OlderServer) -> None:
        self._server = server
        self._known: dict[str, Known] = {}
        self._of_sessions: dict[str, list[str]] = {}
        self._begun: dict[tuple[str, int], asyncio.Task[dict[str, Any]]] = {}
        self._creating: dict[tuple[str, int], asyncio.Task[Answer]] = {}
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

    async def create(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        """Create a model, once if asked twice; return the server's promise."""
        key = str(asked["session_id"]), int(asked["model_seq_id"])
        creating = self._creating.get(key)
        if creating is None:
            creating = self._creating[key] = asyncio.create_task(self._create(asked, headers))
        try:
            answer = await asyncio.shield(creating)
        except (CallRefused, aiohttp.ClientError):
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

    async def _create(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        content = json.dumps(asked).encode()
        answer = await self._server.pass_on("POST", f"{API}create_model", content, headers)
        if answer.is_success:
            noting = asyncio.create_task(self._note(str(asked["session_id"]), answer.json()))
            self._noting.add(noting)
            noting.add_done_callback(self._noting.discard)
        return answer

    async def _note(self, session: str, promised: Mapping[str, Any]) -> None:
        """Note a model, whose id the server tells at once or with the result."""
        with suppress(CallRefused, aiohttp.ClientError, KeyError):
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
