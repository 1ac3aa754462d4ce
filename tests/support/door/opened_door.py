"""A door with a batch of one rollout, over a sampler that says what a test tells it to."""

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from ratchet.adapters.calls import POLICY, Completion, Policy, Sampling
from ratchet.adapters.door.batches import DueRollout, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import END, ROLE
from ratchet.adapters.rendering.chat import Chat
from tests.support.door.door_batches import ListRecorder, batch_at, bearer, begin

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
CHAT = Chat(AutoTokenizer.from_pretrained(TINY), context=400)
SAMPLING = Sampling(200, 1.0, 1.0, -1)
BATCHES = count()
ASK: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TOKENS = {"return_token_ids": True}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>'


class Scripted:
    """Sampler that says `text` in single characters, or random tokens; `hold` makes it wait."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text
        self.hold: Callable[[], Awaitable[object]] | None = None
        self.error: Exception | None = None
        self.asked: list[SamplingParams] = []

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        self.asked.append(sampling_params)
        if self.hold is not None:
            await self.hold()
        if self.error is not None:
            raise self.error
        tokens = self._tokens(sampling_params)
        ended = tokens[-1] in CHAT.stop_tokens
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
        sequence = SampledSequence(
            "stop" if ended else "length", "", np.array(tokens, np.int32), logprobs
        )
        return SampleResponse([sequence])

    def _tokens(self, params: SamplingParams) -> list[int]:
        chosen = random.Random(params.seed)
        if self.text is None:
            return [*chosen.choices(range(20, 200), k=5), CHAT.stop_tokens[0]]
        pieces = self.text.replace("<", "\0<").replace(">", ">\0").split("\0")
        letters = [[p] if p.startswith("<") and p.endswith(">") else [*p] for p in pieces]
        return [t for piece in letters for letter in piece for t in CHAT.encode(letter)]


class Opened:
    """A batch of one rollout that is being played, its sampler, and what was recorded."""

    def __init__(self, door: Door, batch: Batch, recorder: ListRecorder, sampler: Scripted) -> None:
        self.door, self.batch, self.sampler = door, batch, sampler
        self.spans, self.ends = recorder.completions, recorder.ends
        self.refusals = recorder.refusals
        self._recorder = recorder
        (self.rollout,) = recorder.rollouts
        self.url, self.key = batch.url(ROLE, self.rollout), batch.key(self.rollout)
        self.client = openai.OpenAI(base_url=self.url, api_key=self.key, max_retries=0)

    def say(self, text: str) -> None:
        self.sampler.text = text

    def ask(self, **fields: Any) -> Any:
        fields = {"model": "any", "messages": ASK, **fields}
        return self.client.chat.completions.create(**fields)

    def at(self, url: str) -> openai.OpenAI:
        return self.client.with_options(base_url=url)

    def post(self, content: bytes, **headers: str) -> httpx.Response:
        headers = {**bearer(self.key), **headers}
        return httpx.post(
            f"{self.url}/chat/completions", content=content, headers=headers, timeout=None
        )

    def begin_again(self, recorded: Sequence[Completion] = ()) -> openai.OpenAI:
        """Begin the next attempt, for which `recorded` are earlier calls; return its client."""
        self._recorder.remember(self.rollout, recorded)
        batch = begin(self.door, self.batch.name, self.batch.token)
        key = batch.key(self.rollout)
        return self.client.with_options(base_url=batch.url(ROLE, self.rollout), api_key=key)

    def end(self, reward: float = 1.0) -> httpx.Response:
        """Report the rollout's end, as its player does."""
        url = self.batch.url(END, self.rollout)
        end = {"outcome": {"reward": reward}, "seconds": 1.0}
        return httpx.post(url, json=end, headers=bearer(self.batch.token), timeout=None)


@contextmanager
def open_door() -> Iterator[Door]:
    """Open a door that answers for no batch yet."""
    with Door(CHAT, {}, run_seed=7) as door:
        yield door


@contextmanager
def opened_batch(door: Door, recorder: ListRecorder | None = None) -> Iterator[Opened]:
    """Open a batch of one new rollout at the door, and begin to play it."""
    number, sampler = next(BATCHES), Scripted()
    recorder = recorder or ListRecorder([DueRollout(f"train-{number:05d}-0000-00", {})])
    policy = Policy(sampler, "v0")  # pyright: ignore[reportArgumentType]
    name = f"train-{number:05d}.0"
    batch = batch_at(door, name, recorder, SampledBy({POLICY: policy}, SAMPLING))
    with door.opened(batch) as token:
        opened = Opened(door, begin(door, name, token), recorder, sampler)
        with opened.client:
            yield opened
