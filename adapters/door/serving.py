"""The door for callers outside a run: at plain /v1, and nothing is recorded."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request as Received

from adapters.calls import POLICY, Completion, Place, Policy, Request, Sampling
from adapters.chat import Chat
from adapters.door.call_sequence import RoleCalls
from adapters.door.door import Door
from adapters.door.policy_backend import PolicyBackend
from adapters.door.recorded import Answer, Memory


class OpenDoor(Door):
    """Serves one model, by the name `model`. Every call stands alone, with its messages rendered
    whole; it is sampled as its client asks, and by `defaults` where the client does not say.
    """

    prefix = "/v1"

    def __init__(
        self,
        chat: Chat,
        token: str,
        policy: Policy,
        model: str,
        defaults: Sampling,
        port: int = 0,
    ) -> None:
        super().__init__(chat, token, _forget, defaults, run_seed=0, port=port)
        self.policy = policy
        self.model = model

    @property
    def base_url(self) -> str:
        """For an OpenAI client."""
        return f"http://127.0.0.1:{self._server.port}{self.prefix}"

    def _whose(self, request: Received) -> tuple[RoleCalls, Answer]:
        self._check_token(request)
        assert self.policy is not None
        alone = RoleCalls(uuid4().hex, 0, POLICY, chat=self._chat, record=self._record)
        return alone, partial(
            _as_asked, chat=self._chat, policy=self.policy, defaults=self.sampling
        )

    def _model_of(self, request: Received) -> str:
        return self.model


async def _forget(_: Completion) -> None:
    """What a run would record."""


async def _as_asked(
    request: Request,
    place: Place,
    memory: Memory,
    *,
    chat: Chat,
    policy: Policy,
    defaults: Sampling,
) -> Completion:
    """The answer, sampled by the client's own numbers; equal requests with one seed are answered
    alike.
    """
    seed = request.fields.get("seed")
    seeded = place if seed is None else replace(place, rollout_id=f"seed-{seed}")
    sampling = asked_sampling(request.max_tokens, request.fields, defaults)
    backend = PolicyBackend(chat, policy, sampling, run_seed=0)
    completion = await backend.answer(request, seeded, memory)
    return replace(completion, response_id=f"chatcmpl-{place.name('answer')}")


def asked_sampling(
    max_tokens: int | None, fields: Mapping[str, Any], defaults: Sampling
) -> Sampling:
    """The client's numbers over the defaults; one that it sends as null is not said."""

    def number(name: str, default: float) -> Any:
        value = fields.get(name)
        return default if value is None else value

    return Sampling(
        max_tokens or defaults.max_tokens,
        number("temperature", defaults.temperature),
        number("top_p", defaults.top_p),
        number("top_k", defaults.top_k),
    )
