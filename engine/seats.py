"""Completions under way, as arrays: one seat each, so that a step needs no loop over them."""

import numpy as np

from engine.cache import Cache, Pool
from engine.randomness import stream_keys
from engine.sampling import SampledSequence, SampleRequest

_NONE = -1


class Seats:
    """State of up to `count` completions, indexed by seat.

    `length` counts the tokens in the cache, which is also the position of the next one, `last`.
    A completion that ends with its first token has no slot in the cache (`capacity` 0).
    """

    def __init__(self, count: int) -> None:
        self.free = list(range(count))[::-1]
        self.last = np.zeros(count, dtype=np.int64)
        self.length = np.zeros(count, dtype=np.int64)
        self.drawn = np.zeros(count, dtype=np.int64)
        self.limit = np.zeros(count, dtype=np.int64)
        self.capacity = np.zeros(count, dtype=np.int64)
        self.slot = np.full(count, _NONE, dtype=np.int64)
        self.key = np.zeros(count, dtype=np.uint64)
        self.temperature = np.zeros(count, dtype=np.float64)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.top_p = np.zeros(count, dtype=np.float64)
        self.stops = np.full((count, 1), _NONE, dtype=np.int64)
        self.watched = np.zeros(count, dtype=bool)
        """Whether the text must be searched for stop strings."""
        self.tokens = np.zeros((count, 64), dtype=np.int64)
        self.logprobs = np.zeros((count, 64), dtype=np.float32)

    def fill(
        self, request: SampleRequest, seed: int, completions: range, limit: int, stops: list[int]
    ) -> np.ndarray:
        """Seat some completions of a request; as many seats must be free."""
        seats = np.array([self.free.pop() for _ in completions])
        self.length[seats] = len(request.prompt)
        self.drawn[seats] = 0
        self.limit[seats] = limit
        self.capacity[seats] = 0
        self.key[seats] = stream_keys(seed, np.array(completions))
        self.temperature[seats] = request.temperature
        self.top_k[seats] = request.top_k
        self.top_p[seats] = request.top_p
        self.watched[seats] = bool(request.stop_strings)
        if len(stops) > self.stops.shape[1]:
            self.stops = _widened(self.stops, len(stops), _NONE)
        self.stops[seats] = _NONE
        self.stops[seats, : len(stops)] = stops
        return seats

    def record(self, seats: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append one drawn token to each seat."""
        places = self.drawn[seats]
        if places.max() >= self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, 2 * self.tokens.shape[1], 0)
            self.logprobs = _widened(self.logprobs, 2 * self.logprobs.shape[1], 0)
        self.tokens[seats, places] = tokens
        self.logprobs[seats, places] = logprobs
        self.last[seats] = tokens
        self.drawn[seats] += 1

    def completion(self, seat: int, stopped: bool) -> SampledSequence:
        count = self.drawn[seat]
        return SampledSequence(
            tokens=self.tokens[seat, :count].tolist(),
            logprobs=self.logprobs[seat, :count].tolist(),
            stop_reason="stop" if stopped else "length",
        )

    def enter(self, seats: np.ndarray, cache: Cache, length: int) -> None:
        """Give the seats slots that hold `length` tokens."""
        pool = cache.pool(length)
        self.capacity[seats] = pool.capacity
        self.slot[seats] = pool.take(len(seats))

    def leave(self, seats: np.ndarray, cache: Cache) -> None:
        """Give back the slots of the seats that have one."""
        for capacity in np.unique(self.capacity[seats]).tolist():
            if capacity:
                self._release(cache.pools[capacity], seats[self.capacity[seats] == capacity])
        self.capacity[seats] = 0
        self.slot[seats] = _NONE

    def widen(self, seats: np.ndarray, cache: Cache) -> None:
        """Move the seats whose slot is full to slots of the next capacity."""
        full = seats[self.length[seats] >= self.capacity[seats]]
        for capacity in np.unique(self.capacity[full]).tolist():
            movers = full[self.capacity[full] == capacity]
            old, new = cache.pools[capacity], cache.pool(capacity + 1)
            slots = new.take(len(movers))
            new.copy(slots, old, self.slot[movers])
            self._release(old, movers)
            self.capacity[movers] = new.capacity
            self.slot[movers] = slots

    def _release(self, pool: Pool, seats: np.ndarray) -> None:
        left, entered = pool.release(self.slot[seats])
        if len(left):
            # Seats given up keep a slot number until they are filled again: they must not match.
            self.slot[seats] = _NONE
            inhabitants = np.flatnonzero((self.capacity == pool.capacity) & (self.slot >= 0))
            owner = np.full(int(self.slot.max()) + 1, _NONE)
            owner[self.slot[inhabitants]] = inhabitants
            self.slot[owner[left]] = entered


def _widened(table: np.ndarray, width: int, filler: int) -> np.ndarray:
    wider = np.full((len(table), width), filler, dtype=table.dtype)
    wider[:, : table.shape[1]] = table
    return wider
