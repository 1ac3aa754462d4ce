"""Sampling requests, their validation and results, and the jobs that answer them."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.sampling.kv_cache import Block, Cache, Pool

GREEDY_BELOW = 1e-5
"""Temperatures below this value count as 0, because dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Tinker's sampling request.

    A `stop` of None means the model's end tokens; with [] nothing stops a completion. A `top_k` ≤ 0
    means no limit. Without a seed, the operating system gives a random seed.
    """

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0

    @property
    def stop_strings(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return [stop for stop in self.stop or () if isinstance(stop, str)]

    @property
    def stop_tokens(self) -> list[int] | None:
        """Stop tokens of the request; None means the model's own end tokens."""
        if self.stop is None:
            return None
        return [stop for stop in self.stop if isinstance(stop, int)]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """A completion, with its stop token.

    `logprobs` are under the model's own distribution (temperature 1, no top-k or top-p), whatever
    parameters the tokens were drawn with.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Completions of a request, and the log-probabilities of its prompt.

    `prompt_logprobs` [T] begins with NaN, because nothing predicts the first token.
    `topk_prompt_logprobs` holds ids int32 and logprobs float32, both [T, K], most likely first; the
    first row is 0 and -99999. `cached_tokens` counts the prompt's tokens of an earlier request.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    cached_tokens: int = field(default=0, compare=False)


@dataclass(slots=True, eq=False)
class SamplingJob:
    """A sampling request, with the part of its result that is known so far."""

    request: SampleRequest
    lora: LoraWeights | None
    future: Future[SampleResult]
    seed: int
    started: int = 0
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    cached_tokens: int | None = None

    @property
    def wants_prompt(self) -> bool:
        return self.request.prompt_logprobs or self.request.topk_prompt_logprobs > 0

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def finish(self, completion: int, sequence: SampledSequence) -> None:
        self.sequences[completion] = sequence
        if len(self.sequences) == self.request.num_samples and not self.future.done():
            sequences = [self.sequences[number] for number in range(len(self.sequences))]
            self.future.set_result(
                SampleResult(
                    sequences,
                    self.prompt_logprobs,
                    self.topk_prompt_logprobs,
                    self.cached_tokens or 0,
                )
            )


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt to read in this step, for one or several requests of one LoRA.

    The first `known` tokens are in the blocks of `path`; the others are read.
    """

    lora: LoraWeights | None
    prompt: list[int]
    path: list[Block]
    known: int
    entry: int = 0
    """Number of the pool's entry that holds the prompt's keys and values."""
    slots: list[np.ndarray] = field(default_factory=list)
    jobs: list[SamplingJob] = field(default_factory=list)
    start: int = 0
    """Place of the first token that is read, in the packed row."""
    head: int = 0
    """Place of the first needed row among the rows of logits."""

    @property
    def whole(self) -> bool:
        """True if the logits of every position are needed, not only of the last."""
        return any(job.wants_prompt for job in self.jobs)


def check_request(request: SampleRequest, model: LanguageModel) -> None:
    """Raise RequestRefused if the model cannot answer the request."""
    _check_prompt(request.prompt, model)
    if request.num_samples < 1:
        raise RequestRefused(f"num_samples is {request.num_samples}; it must be 1 or more")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}; it must be 1 or more")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise RequestRefused(f"temperature is {request.temperature}; it must be 0 (greedy) or more")
    if not 0 < request.top_p <= 1:
        raise RequestRefused(f"top_p is {request.top_p}; it must be above 0 and at most 1")
    if not 0 <= request.topk_prompt_logprobs <= model.vocab_size:
        raise RequestRefused(
            f"topk_prompt_logprobs is {request.topk_prompt_logprobs}; the vocabulary has "
            f"{model.vocab_size} tokens, so give a number from 0 to {model.vocab_size}"
        )
    if any(not stop for stop in request.stop_strings):
        raise RequestRefused(
            "an empty stop string would stop every completion; remove the empty string"
        )
    if request.stop_strings and request.stop_tokens:
        raise RequestRefused("stop mixes strings and token ids; give one kind")


def _check_prompt(prompt: list[int], model: LanguageModel) -> None:
    if not prompt:
        raise RequestRefused("the prompt is empty; give it at least one token")
    if len(prompt) > model.max_context:
        raise RequestRefused(
            f"the prompt has {len(prompt)} tokens, but the context of {model.name} ends at "
            f"{model.max_context}; shorten the prompt"
        )
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise RequestRefused(
            f"the prompt has the token {wrong}, but {model.name} has the tokens 0 to "
            f"{model.vocab_size - 1}; was it encoded with another tokenizer?"
        )


_NONE = -1


class SlotTable:
    """State of up to `count` running completions, one slot each.

    `length` is the number of tokens in the cache and so the position of the next token, `last`.
    A completion that ends with its first token has no entry in the cache (`capacity` 0).
    """

    def __init__(self, count: int) -> None:
        self.free = list(range(count))[::-1]
        self.last = np.zeros(count, dtype=np.int64)
        self.length = np.zeros(count, dtype=np.int64)
        self.drawn = np.zeros(count, dtype=np.int64)
        self.limit = np.zeros(count, dtype=np.int64)
        self.reserved = np.zeros(count, dtype=np.int64)
        """The most tokens that the cache will hold for the completion; 0 for a free slot."""
        self.capacity = np.zeros(count, dtype=np.int64)
        self.entry = np.full(count, _NONE, dtype=np.int64)
        self.key = np.zeros(count, dtype=np.uint64)
        self.temperature = np.zeros(count, dtype=np.float64)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.top_p = np.zeros(count, dtype=np.float64)
        self.stops = np.full((count, 1), _NONE, dtype=np.int64)
        self.watched = np.zeros(count, dtype=bool)
        """True if the text must be searched for stop strings."""
        self.tokens = np.zeros((count, 64), dtype=np.int64)
        self.logprobs = np.zeros((count, 64), dtype=np.float32)

    def assign(
        self, request: SampleRequest, seed: int, completions: range, limit: int, stops: list[int]
    ) -> np.ndarray:
        """Assign free slots to some completions of a request; enough slots must be free."""
        slots = np.array([self.free.pop() for _ in completions])
        self.length[slots] = len(request.prompt)
        self.drawn[slots] = 0
        self.limit[slots] = limit
        self.reserved[slots] = len(request.prompt) + limit
        self.capacity[slots] = 0
        self.key[slots] = stream_keys(seed, np.array(completions))
        self.temperature[slots] = request.temperature
        self.top_k[slots] = request.top_k
        self.top_p[slots] = request.top_p
        self.watched[slots] = bool(request.stop_strings)
        if len(stops) > self.stops.shape[1]:
            self.stops = _widen(self.stops, len(stops), _NONE)
        self.stops[slots] = _NONE
        self.stops[slots, : len(stops)] = stops
        return slots

    def record(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        places = self.drawn[slots]
        if places.max() >= self.tokens.shape[1]:
            self.tokens = _widen(self.tokens, 2 * self.tokens.shape[1], 0)
            self.logprobs = _widen(self.logprobs, 2 * self.logprobs.shape[1], 0)
        self.tokens[slots, places] = tokens
        self.logprobs[slots, places] = logprobs
        self.last[slots] = tokens
        self.drawn[slots] += 1

    def completion(self, slot: int, stopped: bool) -> SampledSequence:
        count = self.drawn[slot]
        return SampledSequence(
            tokens=self.tokens[slot, :count].tolist(),
            logprobs=self.logprobs[slot, :count].tolist(),
            stop_reason="stop" if stopped else "length",
        )

    def take_entries(self, slots: np.ndarray, cache: Cache, length: int) -> None:
        """Give the slots cache entries that hold `length` tokens."""
        pool = cache.pool(length)
        self.capacity[slots] = pool.capacity
        self.entry[slots] = pool.take(len(slots))

    def release_entries(self, slots: np.ndarray, cache: Cache) -> None:
        for capacity in np.unique(self.capacity[slots]).tolist():
            if capacity:
                self._release(cache.pools[capacity], slots[self.capacity[slots] == capacity])
        self.capacity[slots] = 0
        self.reserved[slots] = 0
        self.entry[slots] = _NONE

    def enlarge_entries(self, slots: np.ndarray, cache: Cache) -> None:
        """Move slots whose cache entry is full to entries of the next capacity."""
        full = slots[self.length[slots] >= self.capacity[slots]]
        for capacity in np.unique(self.capacity[full]).tolist():
            movers = full[self.capacity[full] == capacity]
            old, new = cache.pools[capacity], cache.pool(capacity + 1)
            entries = new.take(len(movers))
            new.copy(entries, old, self.entry[movers])
            self._release(old, movers)
            self.capacity[movers] = new.capacity
            self.entry[movers] = entries

    def _release(self, pool: Pool, slots: np.ndarray) -> None:
        left, entered = pool.release(self.entry[slots])
        if len(left):
            # Free slots keep an entry number until they are assigned again: they must not match.
            self.entry[slots] = _NONE
            inhabitants = np.flatnonzero((self.capacity == pool.capacity) & (self.entry >= 0))
            owner = np.full(int(self.entry.max()) + 1, _NONE)
            owner[self.entry[inhabitants]] = inhabitants
            self.entry[owner[left]] = entered


def _widen(table: np.ndarray, width: int, filler: int) -> np.ndarray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=filler)


# Counter-based random numbers: (seed, completion, token) → a number in [0, 1). A draw depends on
# these three alone, because no generator has a state. A restarted completion draws the same
# numbers, whatever is computed beside it and in whatever order.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def stream_keys(seed: int, completions: np.ndarray) -> np.ndarray:
    """Return one 64-bit key (uint64) per completion of a request."""
    seeded = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return _mix(seeded ^ _mix(completions.astype(np.uint64) + np.uint64(1)))


def uniforms(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return draw number `tokens[i]` of stream `keys[i]`: float64 in [0, 1), 53 bits."""
    counters = (tokens.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(keys + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
