"""The keys and values of prompts and running sequences, in pools by capacity."""

import numpy as np
import torch

from engine.model.attention import bucket

KEEP_BYTES = 2**28
"""An empty pool keeps its memory up to this size, because touching fresh memory is slow."""


class Pool:
    """Cache entries of one capacity in tokens, one per sequence; the first `count` are in use.

    `data` has the shape [keys and values, layers, entries, heads, capacity, width]. An entry begins
    as zeros: values beyond a sequence's end are multiplied by an exact zero and must not be NaN.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        capacity: int,
        device: torch.device,
        keep: int = KEEP_BYTES,
    ) -> None:
        layers, heads, width = shape
        self.capacity = capacity
        self.keep = keep
        self.count = 0
        self._hold(torch.zeros((2, layers, 0, heads, capacity, width), device=device))

    def take(self, number: int) -> np.ndarray:
        """Reserve the next entries, for `number` more sequences."""
        start = self.count
        self.count += number
        if self.count > self.data.shape[2]:
            self._grow(max(self.count, 2 * self.data.shape[2]))
        self.data[:, :, start : self.count].zero_()
        return np.arange(start, self.count)

    def copy(self, entries: np.ndarray, source: "Pool", origins: np.ndarray) -> None:
        """Copy entries of a pool of at most this capacity into these entries."""
        contents = source.data.index_select(2, _index(origins, source.data))
        self.data[:, :, :, :, : source.capacity].index_copy_(
            2, _index(entries, self.data), contents
        )

    def store(self, which: int, layer: int, places: torch.Tensor, new: torch.Tensor) -> None:
        """Write keys (0) or values (1) [tokens, heads, width] to the places [tokens · heads].

        A place is a number of [entries · heads · capacity].
        """
        self._rows[which][layer].index_copy_(0, places, new.view(-1, new.shape[2]))

    def places(self, entries: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return where tokens at these positions of these entries are stored [tokens · heads]."""
        heads = self.data.shape[3]
        first = (entries[:, None] * heads + np.arange(heads)) * self.capacity
        return _index((first + positions[:, None]).reshape(-1), self.data)

    def release(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Free entries; return the last ones in use, which move, and the holes they move into."""
        used = np.ones(self.count, dtype=bool)
        used[entries] = False
        self.count -= len(entries)
        holes = np.flatnonzero(~used[: self.count])
        movers = np.flatnonzero(used[self.count :]) + self.count
        if len(movers):
            self.copy(holes, self, movers)
        self._give_back()
        return movers, holes

    def clear(self) -> None:
        """Free all entries."""
        self.count = 0
        self._give_back()

    def _give_back(self) -> None:
        if self.count == 0 and self.data.nbytes > self.keep:
            self._hold(self.data[:, :, :0].clone())

    def _grow(self, entries: int) -> None:
        data = self.data.new_zeros((*self.data.shape[:2], entries, *self.data.shape[3:]))
        data[:, :, : self.data.shape[2]] = self.data
        self._hold(data)

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        # Views by layer are made once: a sampling step would spend much of its time on them.
        self._rows = [[layer.view(-1, data.shape[-1]) for layer in kind] for kind in data]


class Cache:
    """Pools of cache entries, by capacity.

    A pool is made when a sequence needs it. One for more than `usual` tokens keeps no memory when
    it is empty, since few sequences are so long.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device, usual: int) -> None:
        self.shape = shape
        self.usual = bucket(usual)
        self.device = device
        self.pools: dict[int, Pool] = {}

    def pool(self, length: int) -> Pool:
        """Return the pool whose entries hold `length` tokens."""
        capacity = bucket(length)
        if capacity not in self.pools:
            keep = KEEP_BYTES if capacity <= self.usual else 0
            self.pools[capacity] = Pool(self.shape, capacity, self.device, keep)
        return self.pools[capacity]

    def clear(self) -> None:
        for pool in self.pools.values():
            pool.clear()


def _index(entries: np.ndarray, data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(entries).to(data.device)
