"""A chat endpoint for clients outside a run: at plain /v1, and nothing is recorded."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from uuid import uuid4

from starlette.requests import Request

from ratchet.adapters.calls import POLICY, Begun, CallId, Completion, Policy, Sampling
from ratchet.adapters.calls import Request as ChatRequest
from ratchet.adapters.dialects.fields import NUMBER, Fields
from ratchet.adapters.door.chat_api import ChatApi, ServedModel, check_key, token_of
from ratchet.adapters.door.policy_backend import PolicyBackend
from ratchet.adapters.door.role_calls import CallSequence, Memory
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.rendering.chat import Chat

API_PREFIX = "/v1"


class OpenDoor(ChatApi):
    """Endpoint of one policy. Every call stands alone, with its messages rendered whole.

    The policy's version is the model's name; `defaults` samples for clients that name no numbers.
    """

    def __init__(
        self, chat: Chat, policy: Policy, defaults: Sampling, api_key: str, port: int = 0
    ) -> None:
        self._policy, self._defaults = policy, defaults
        self._api_key = api_key
        super().__init__(chat, API_PREFIX, Listener(port=port))

    def variables(self) -> dict[str, str]:
        """Return the environment variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.address + API_PREFIX,
            "OPENAI_API_KEY": self._api_key,
            "OPENAI_MODEL": self._policy.version,
        }

    def check_token(self, request: Request) -> None:
        wrong = "The API key is not this endpoint's; use the one that was printed at its start."
        check_key(token_of(request), self._api_key, wrong)

    def find_model(self, request: Request) -> ServedModel:
        self.check_token(request)
        alone = CallSequence(CallId(uuid4().hex, 0, POLICY, 0), self.chat, _NoRecorder())
        return ServedModel(self._policy.version, partial(alone.answer_all, answer=self._sample))

    def note_refusal(self, *_: object) -> None:
        """Note nothing: there is no attempt to which a call belongs."""

    async def _sample(self, request: ChatRequest, call: CallId, memory: Memory) -> Completion:
        """Sample by the client's own numbers; equal requests with one seed get equal answers."""
        seed = request.fields.get("seed")
        seeded = call if seed is None else replace(call, rollout_id=f"seed-{seed}")
        sampling = choose_sampling(request.max_tokens, request.fields, self._defaults)
        backend = PolicyBackend(self.chat, self._policy, sampling, run_seed=0)
        completion = await backend.answer(request, seeded, memory)
        return replace(completion, response_id=call.response_id)


class _NoRecorder:
    """Recorder that keeps nothing."""

    def begun(self, begun: Begun) -> None:
        pass

    async def answered(self, completion: Completion) -> None:
        pass


def choose_sampling(
    max_tokens: int | None, fields: Mapping[str, object], defaults: Sampling
) -> Sampling:
    """Take the client's numbers over the defaults; null counts as absent."""
    sent = Fields(dict(fields))
    asked = {
        "max_tokens": max_tokens,
        "temperature": sent.read("temperature", NUMBER),
        "top_p": sent.read("top_p", NUMBER),
        "top_k": sent.read("top_k", int) or None,  # 0 is vLLM's for all
    }
    return replace(defaults, **{name: value for name, value in asked.items() if value is not None})
