"""Attention of a sampling step, which reads and writes the keys and values of its sequences.

A token's result depends on its sequence and its position alone. The tokens of a prompt are computed
in chunks of CHUNK positions, and each chunk in a product of one shape, over the keys up to the
chunk's end. So it makes no difference which of a prompt's tokens are read in this step and which
were read before.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from engine.model.attention import attend_masked, bucket
from engine.model.forward_pass import AttentionCall
from engine.sampling.kv_cache import Pool

CHUNK = 64

WIDE = 128
WIDE_ROWS = 4
"""Number of queries to which a product over heads at least WIDE wide is padded.

A product of four such queries takes less time than one of two or three. For narrower heads up to
half of the time would be spent on padding."""


@dataclass(slots=True)
class Chunks:
    """The chunks of one number, of prompts in one pool.

    `rows` [n, CHUNK] are places in the packed row. A position that is not read in this step has
    the place of another token of its prompt: its result is not used.
    """

    number: int
    entries: torch.Tensor
    rows: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(self, call: AttentionCall, pool: Pool) -> torch.Tensor:
        """Return the attended values [n · CHUNK, heads, width]."""
        count, heads, width = len(self.rows), *call.query.shape[1:]
        query = call.query.index_select(0, self.rows.view(-1)).view(count, CHUNK, heads, width)
        known = pool.data[:, call.layer, :, :, : self.length]
        key, value = known.index_select(1, self.entries)
        values = attend_masked(call, query.transpose(1, 2), key, value, self.mask(call.window))
        return values.transpose(1, 2).flatten(0, 1)

    @property
    def length(self) -> int:
        """The number of keys: those up to the chunk's end, rounded up."""
        return bucket(CHUNK * (self.number + 1))

    def mask(self, window: int | None) -> torch.Tensor:
        """Return [CHUNK, length], true where a query may attend."""
        span = window or self.length
        if span not in self.masks:
            keys = torch.arange(self.length, device=self.rows.device)
            queries = torch.arange(CHUNK, device=self.rows.device) + CHUNK * self.number
            behind = queries[:, None] - keys[None, :]
            self.masks[span] = (behind >= 0) & (behind < span)
        return self.masks[span]


@dataclass(slots=True)
class PromptGroup:
    """The tokens read in this step of prompts in one pool: their places in the row and the pool."""

    pool: Pool
    rows: torch.Tensor
    places: torch.Tensor
    chunks: list[Chunks]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values of all chunks, one after the other."""
        for which, packed in enumerate((call.key, call.value)):
            self.pool.store(which, call.layer, self.places, packed.index_select(0, self.rows))
        return torch.cat([chunks.attend(call, self.pool) for chunks in self.chunks])


@dataclass(slots=True)
class CachedGroup:
    """One new token for each sequence of a pool.

    `rows[i]` is the packed position of the new token of the sequence in entry `first + i`;
    `lengths[i]` is the number of tokens already in that entry.
    """

    pool: Pool
    first: int
    rows: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    known: list[list[torch.Tensor]] = field(init=False)
    """By kind and layer, the keys (0) or values (1) [sequences · heads, capacity, width]."""

    def __post_init__(self) -> None:
        mine = self.pool.data[:, :, self.first : self.first + len(self.rows)].flatten(2, 3)
        self.known = [[*kind] for kind in mine]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values [sequences, heads, width]."""
        count = len(self.rows)
        query = call.query.index_select(0, self.rows) * call.scale
        for which, packed in enumerate((call.key, call.value)):
            self.pool.store(which, call.layer, self.places, packed.index_select(0, self.rows))
        keys, values = (kind[call.layer] for kind in self.known)
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


@dataclass(slots=True)
class SamplingAttention:
    """Attention over prompts and running sequences, packed into one row.

    `order[t]` is the place of packed token t's values in the concatenated results of the groups.
    The places of padding tokens are arbitrary.
    """

    groups: list[PromptGroup | CachedGroup]
    order: torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        parts = [group.attend(call) for group in self.groups]
        return torch.cat(parts).index_select(0, self.order)


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt that is read from its position `known` on.

    `place` is that token's place in the packed row; `entry` holds the prompt's keys and values.
    """

    entry: int
    known: int
    length: int
    place: int


def prompt_group(
    pool: Pool, readings: list[Reading], order: np.ndarray, offset: int
) -> tuple[PromptGroup, int]:
    """Group the prompts of a pool by chunk; fill `order` from `offset` on and return its end."""
    steps = np.arange(CHUNK)
    tables: dict[int, list[tuple[int, np.ndarray]]] = {}
    for reading in readings:
        for number in range(reading.known // CHUNK, (reading.length - 1) // CHUNK + 1):
            positions = number * CHUNK + steps
            read = (positions >= reading.known) & (positions < reading.length)
            rows = reading.place + np.where(read, positions - reading.known, 0)
            tables.setdefault(number, []).append((reading.entry, np.where(read, rows, -1)))
    chunks = []
    for number, members in sorted(tables.items()):
        entries, rows = (np.array(column) for column in zip(*members, strict=True))
        order[rows[rows >= 0]] = offset + np.flatnonzero(rows >= 0)
        offset += rows.size
        some = rows.max(axis=1, keepdims=True)
        chunks.append(
            Chunks(number, _index(entries, pool), _index(np.where(rows < 0, some, rows), pool))
        )
    spans = [(one.entry, np.arange(one.known, one.length), one.place) for one in readings]
    rows = np.concatenate([place + np.arange(len(span)) for _, span, place in spans])
    entries = np.concatenate([np.full(len(span), entry) for entry, span, _ in spans])
    places = pool.places(entries, np.concatenate([span for _, span, _ in spans]))
    return PromptGroup(pool, _index(rows, pool), places, chunks), offset


def _index(numbers: np.ndarray, pool: Pool) -> torch.Tensor:
    return torch.from_numpy(numbers).to(pool.data.device)
