"""A server of OpenAI's API that scores prompts, as vLLM 0.32 does, and its faults."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from starlette.types import Receive, Scope, Send

from ratchet.adapters.network.app_server import AppServer
from ratchet.adapters.tinker.service import PatientSampler
from tests.support.servers.fault_proxy import answer_json, read_body

MODEL, SMALLEST = "local/tiny-chat", -9999.0
MOST_LIKELIEST = 20
"""Most tokens of a place, as vLLM has it unless --max-logprobs says otherwise."""


class Decoding(Protocol):
    """Tokenizer of the model."""

    def decode(self, token_ids: list[int]) -> str: ...


Place = dict[str, dict[str, Any]]
Fault = Callable[[list[Place | None] | None], list[Place | None] | None]
"""Function that alters the log-probabilities of an answer."""


@dataclass
class PlainServer:
    """Server whose scores are those of a sampler; `fault` alters them."""

    sampler: PatientSampler
    tokenizer: Decoding
    fault: Fault | None = None
    refusal: tuple[int, str] | None = None
    """Status and text with which the server answers instead."""
    models: tuple[int, Any] = (200, {"object": "list", "data": [{"id": MODEL}]})
    """Status and body of the list of models."""
    asked: list[dict[str, str]] = field(default_factory=list)
    """Headers of the requests."""
    url: str = ""

    @property
    def model(self) -> str:
        """The model's name in a recipe."""
        return f"{self.url}/v1#{MODEL}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        self.asked.append({key.decode(): value.decode() for key, value in scope["headers"]})
        if scope["path"] == "/v1/models":
            await answer_json(send, *self.models)
            return
        if scope["path"] != "/v1/completions":
            await answer_json(send, 404, {"detail": "Not Found"})
            return
        asked = json.loads(body)
        if (refusal := self.refusal or self._refusal(asked)) is not None:
            status, message = refusal
            await answer_json(send, status, {"error": {"message": message, "code": status}})
            return
        tokens, k = asked["prompt"], asked["prompt_logprobs"]
        places: list[Place | None] | None = await asyncio.to_thread(self._places, tokens, k)
        if self.fault is not None:
            places = self.fault(places)
        choice = {"index": 0, "text": "?", "finish_reason": "length", "prompt_logprobs": places}
        answer = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL}
        await answer_json(send, 200, {**answer, "choices": [choice]})

    def _refusal(self, asked: dict[str, Any]) -> tuple[int, str] | None:
        if asked["model"] != MODEL:
            return 404, f"The model `{asked['model']}` does not exist."
        if asked["max_tokens"] < 1:
            return 400, "max_tokens must be at least 1, got 0."
        if asked["prompt_logprobs"] > MOST_LIKELIEST:
            return 400, f"Requested prompt logprobs of more than max allowed: {MOST_LIKELIEST}"
        return None

    def _places(self, tokens: Sequence[int], k: int) -> list[Place | None]:
        last = [len(tokens) - 1]
        [own] = self.sampler.score([tokens], last)
        places: list[dict[int, float]] = [
            {token: score} for token, score in zip(tokens[1:], own.tolist(), strict=True)
        ]
        if k:
            [(likeliest, scores)] = self.sampler.score_likeliest([tokens], last, k)
            rows = zip(places, likeliest.tolist(), scores.tolist(), strict=True)
            for place, row, values in rows:
                place |= dict(zip(row, values, strict=True))
        return [None, *map(self._written, places)]

    def _written(self, place: dict[int, float]) -> Place:
        ranked = sorted(place.items(), key=lambda one: -one[1])
        return {
            str(token): {
                "logprob": max(float(np.float32(score)), SMALLEST),
                "rank": rank,
                "decoded_token": self.tokenizer.decode([token]),
            }
            for rank, (token, score) in enumerate(ranked, 1)
        }


@contextmanager
def plain_server(sampler: PatientSampler, tokenizer: Any) -> Iterator[PlainServer]:
    """Yield a server of the sampler's model."""
    plain = PlainServer(sampler, tokenizer)
    server = AppServer(plain)
    server.start()
    plain.url = server.url
    try:
        yield plain
    finally:
        server.stop()
