"""A door with one rollout admitted, over a sampler that says what a test tells it to."""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from adapters.calls import Completion, Policy, Sampling
from adapters.chat import Chat
from adapters.door.door import Door

TINY = Path(__file__).parent.parent / "engine" / "tiny_chat"
CHAT = Chat(AutoTokenizer.from_pretrained(TINY), context=400)
TOKEN = "a-token-of-this-run"
ROLLOUTS = count()
ASK: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>'


class Scripted:
    """A sampler. It says `text` in single characters, or random tokens; `hold` makes it wait."""

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
    """A door with one rollout admitted, its sampler, and what it recorded."""

    def __init__(self, door: Door, sampler: Scripted, spans: list[Completion]) -> None:
        self.door, self.sampler, self.spans = door, sampler, spans
        door.policy = Policy(sampler, "v0")  # pyright: ignore[reportArgumentType]
        self.rollout = f"train-00000-0000-{next(ROLLOUTS):02d}"
        door.admit(self.rollout, 0)
        self.url = door.url(self.rollout, 0)
        self.client = openai.OpenAI(base_url=self.url, api_key=TOKEN, max_retries=0)

    def say(self, text: str) -> None:
        self.sampler.text = text

    def ask(self, **fields: Any) -> Any:
        fields = {"model": "any", "messages": ASK, **fields}
        return self.client.chat.completions.create(**fields)

    def at(self, url: str) -> openai.OpenAI:
        return self.client.with_options(base_url=url)

    def post(self, content: bytes, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {TOKEN}", **headers}
        return httpx.post(f"{self.url}/chat/completions", content=content, headers=headers)


@contextmanager
def opening() -> Iterator[tuple[Door, list[Completion]]]:
    """A door that is open, and the list of what it records."""
    spans: list[Completion] = []

    async def record(completion: Completion) -> None:
        spans.append(completion)

    with Door(CHAT, TOKEN, record, Sampling(200, 1.0, 1.0, -1), run_seed=7) as door:
        yield door, spans


@contextmanager
def admitted(shared: tuple[Door, list[Completion]]) -> Iterator[Opened]:
    """A new rollout behind that door, and nothing recorded yet."""
    door, spans = shared
    spans.clear()
    opened = Opened(door, Scripted(), spans)
    with opened.client:
        yield opened
    door.dismiss(opened.rollout, 0).result(5)
