"""The state of running completions as arrays, so that a step needs no loop over completions."""

import numpy as np

from ratchet.engine.randomness import stream_keys
from ratchet.engine.sampling.kv_cache import Cache, Pool
from ratchet.engine.sampling.requests import SampledSequence, SampleRequest

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
        """Free the cache entries of the slots that have one."""
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
