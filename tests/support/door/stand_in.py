"""A stand-in for the policy, whose text seldom encodes to the tokens that it sampled."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from ratchet.adapters.rendering.chat import Chat

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
CHAT = Chat(TOKENIZER, context=100_000)
END = CHAT.stop_tokens[0]

Write = Callable[[random.Random, SamplingParams, Sequence[int]], list[int]]
"""Writes the tokens to sample, from the call's own randomness, its parameters and its prompt."""


def letters(text: str) -> list[int]:
    """Encode each character by itself, which is another encoding than that of the whole text."""
    return [token for character in text for token in _letter(character)]


@cache
def _letter(character: str) -> list[int]:
    return CHAT.encode(character)


def anything(chosen: random.Random) -> list[int]:
    """Choose a few tokens, parts of characters and marks included, and spell half of them out."""
    tokens = chosen.choices(range(len(TOKENIZER)), k=chosen.randint(1, 12))
    spelt = [letters(CHAT.text([t])) if chosen.random() < 0.5 else [t] for t in tokens]
    return [token for tokens in spelt for token in tokens if token not in CHAT.stop_tokens]


def turn(chosen: random.Random) -> list[int]:
    """Choose tokens as `anything` does, mostly with an end token, which may be the only one."""
    ends = chosen.random() < 0.8
    return [*anything(chosen), END] if ends else anything(chosen) or [END]


def tool_call(name: str, arguments: str) -> list[int]:
    """Write a tool call, its JSON spelt letter by letter with the spaces that `arguments` has."""
    opening, closing = CHAT.encode("<tool_call></tool_call>")
    said = letters(f'\n{{"name": "{name}", "arguments": {arguments}}}\n')
    return [opening, *said, closing, END]


def cut(tokens: list[int], params: SamplingParams) -> list[int]:
    """Cut tokens at the length that was asked for, or after the first stop string."""
    tokens = tokens[: params.max_tokens]
    stops = [stop for stop in params.stop or () if isinstance(stop, str)]
    lengths = range(1, len(tokens)) if stops else ()
    texts = ((length, CHAT.text(tokens[:length])) for length in lengths)
    end = next((length for length, text in texts if any(stop in text for stop in stops)), None)
    return tokens[:end]


class StandIn:
    """Sampler whose tokens `write` makes from the seed of the call."""

    def __init__(self, write: Write) -> None:
        self._write = write

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        chosen = random.Random(sampling_params.seed)
        tokens = cut(self._write(chosen, sampling_params, prompt.to_ints()), sampling_params)
        logprobs = np.array([-chosen.random() for _ in tokens], np.float32)
        reason = "length" if tokens[-1] not in CHAT.stop_tokens else "stop"
        return SampleResponse(
            [SampledSequence(reason, "", np.array(tokens, np.int32), logprobs)] * num_samples
        )
