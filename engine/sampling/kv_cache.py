"""The keys and values of running sequences, and the attention that reads and writes them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from engine.model.attention import Group, bucket
from engine.model.forward_pass import AttentionCall

WIDE = 128
WIDE_ROWS = 4
"""Number of queries to which a product over heads at least WIDE wide is padded.

A product of four such queries takes less time than one of two or three. For narrower heads up to
half of the time would be spent on padding."""

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
        self.data = torch.zeros((2, layers, 0, heads, capacity, width), device=device)

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

    def release(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Free entries; return the last ones in use, which move, and the holes they move into."""
        used = np.ones(self.count, dtype=bool)
        used[entries] = False
        self.count -= len(entries)
        holes = np.flatnonzero(~used[: self.count])
        movers = np.flatnonzero(used[self.count :]) + self.count
        if len(movers):
            self.copy(holes, self, movers)
        if self.count == 0 and self.data.nbytes > self.keep:
            self.data = self.data[:, :, :0].clone()
        return movers, holes

    def _grow(self, entries: int) -> None:
        data = self.data.new_zeros((*self.data.shape[:2], entries, *self.data.shape[3:]))
        data[:, :, : self.data.shape[2]] = self.data
        self.data = data


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


@dataclass(slots=True)
class CachedGroup:
    """One new token for each sequence of a pool.

    `rows[i]` is the packed position of the new token of the sequence in entry i; `lengths[i]` is
    the number of tokens already in that entry.
    """

    pool: Pool
    rows: torch.Tensor
    lengths: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    places: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        heads, capacity = self.pool.data.shape[3:5]
        entries = torch.arange(len(self.rows), device=self.rows.device)
        head = torch.arange(heads, device=self.rows.device)
        first = (entries[:, None] * heads + head) * capacity
        self.places = (first + self.lengths[:, None]).view(-1)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values [sequences, heads, width]."""
        count = len(self.rows)
        query = call.query.index_select(0, self.rows) * call.scale
        keys = self._store(0, call.layer, call.key)
        values = self._store(1, call.layer, call.value)
        heads, width = call.key.shape[1:]
        shared = query.shape[1] // heads
        grouped = query.view(-1, shared, width)
        if width >= WIDE:
            grouped = F.pad(grouped, (0, 0, 0, -shared % WIDE_ROWS))
        scores = torch.bmm(grouped, keys.transpose(1, 2))
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores.view(count, -1, self.pool.capacity).add_(self.mask(call.window))
        return torch.bmm(scores.softmax(-1), values)[:, :shared].reshape(count, -1, width)

    def _store(self, which: int, layer: int, packed: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' keys or values; return all [sequences · heads, capacity, width]."""
        data = self.pool.data[which, layer]
        width = packed.shape[2]
        new = packed.index_select(0, self.rows).view(-1, width)
        data.view(-1, width).index_copy_(0, self.places, new)
        return data[: len(self.rows)].view(-1, self.pool.capacity, width)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return [sequences, 1, capacity]: 0 where the new token may attend, -inf elsewhere."""
        reach = min(window or self.pool.capacity, self.pool.capacity)
        if reach not in self.masks:
            positions = torch.arange(self.pool.capacity, device=self.rows.device)
            behind = self.lengths[:, None] - positions
            hidden = (behind < 0) | (behind >= reach)
            mask = torch.zeros(hidden.shape, device=self.rows.device)
            self.masks[reach] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self.masks[reach]


@dataclass(frozen=True, slots=True)
class Deposit:
    """Members of a fresh group, and the pool's entries that keep their keys and values."""

    pool: Pool
    members: torch.Tensor
    entries: torch.Tensor

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, each [members of the group, heads, bucket, width]."""
        length = key.shape[2]
        for which, new in enumerate((key, value)):
            self.pool.data[which, layer][:, :, :length].index_copy_(
                0, self.entries, new.index_select(0, self.members)
            )


@dataclass(slots=True)
class SamplingAttention:
    """Attention over prompts (`fresh`) and running sequences (`cached`), packed into one row.

    `order[t]` is the place of packed token t's values in the concatenated results of the groups.
    The places of padding tokens are arbitrary.
    """

    fresh: list[tuple[Group, list[Deposit]]]
    cached: list[CachedGroup]
    order: torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        parts = []
        for group, deposits in self.fresh:
            key, value = group.gather(call.key), group.gather(call.value)
            for deposit in deposits:
                deposit.keep(call.layer, key, value)
            parts.append(group.attend(call, group.gather(call.query), key, value))
        parts += [group.attend(call) for group in self.cached]
        return torch.cat(parts).index_select(0, self.order)


def _index(entries: np.ndarray, data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(entries).to(data.device)
