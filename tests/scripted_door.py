"""A door whose policy says what a test tells it to: the real protocol, without a model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from adapters.calls import POLICY, Completion, Example, Policy, Sampling
from adapters.chat import Chat
from adapters.door.backends import create_backends
from adapters.door.door import Door
from adapters.harness.agents import Endpoint

TINY = Path(__file__).parent.parent / "engine" / "tiny_chat"
TOKEN = "a-token-of-this-door"
GROUP = "train-00000-0000"


@dataclass(frozen=True)
class Scripted:
    """A sampler that answers the last message of the prompt with `answer` of it."""

    tokenizer: Any
    chat: Chat
    answer: Callable[[str], str]

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        asked = self.tokenizer.decode(prompt.to_ints())
        last = asked.rsplit("<|im_start|>", 2)[1].split("\n", 1)[1].rsplit("<|im_end|>", 1)[0]
        tokens = [*self.chat.encode(self.answer(last)), self.chat.stop_tokens[0]]
        logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
        return SampleResponse([SampledSequence("stop", "", np.array(tokens, np.int32), logprobs)])


class ScriptedDoor:
    """A door, and the calls that it has answered."""

    def __init__(self, door: Door, calls: list[Completion], roles: Mapping[str, str]) -> None:
        self._door = door
        self._roles = roles
        self.calls = calls

    def endpoints(self, rollout: int = 0, example: Example | None = None) -> dict[str, Endpoint]:
        """Where the agent of this rollout finds each role; each rollout may be asked for once."""
        name = f"{GROUP}-{rollout:02d}"
        self._door.admit(name, 0, example=example)
        return {
            role: Endpoint(self._door.url(name, 0, role), TOKEN, role)
            for role in [POLICY, *self._roles]
        }

    def said(self, rollout: int = 0) -> list[str]:
        """What was said in a rollout, from its first call's messages to its last answer."""
        calls = [c for c in self.calls if c.place.rollout_id == f"{GROUP}-{rollout:02d}"]
        return [m["content"] for m in [*calls[-1].request.messages, calls[-1].message]]


@contextmanager
def scripted_door(
    answer: Callable[[str], str], roles: Mapping[str, str] | None = None
) -> Iterator[ScriptedDoor]:
    """A door whose policy gives `answer` to the last thing it was told; `roles` as in a recipe."""
    roles = roles or {}
    calls: list[Completion] = []

    async def record(completion: Completion) -> None:
        calls.append(completion)

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chat = Chat(tokenizer)
    sampling, answering = Sampling(200, 1.0, 1.0, -1), create_backends(roles, run_seed=7)
    with Door(chat, TOKEN, record, sampling, run_seed=7, roles=answering) as door:
        scripted: Any = Scripted(tokenizer, chat, answer)
        door.policy = Policy(scripted, "v0")
        yield ScriptedDoor(door, calls, roles)
