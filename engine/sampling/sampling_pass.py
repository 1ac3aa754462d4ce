"""The forward pass of sampling, whose results do not depend on what shares the batch.

The same request gives the same bits whatever is computed beside it. A row of a matrix product
keeps its bits however many rows there are (`engine/model/products.py`), if their number is one
that `Products.round_up` gives: the rows of each LoRA are padded to one. Attention depends on a
token's sequence and position alone; normalisations and activations work row by row.

The tokens of a prompt are computed in chunks of CHUNK positions, and each chunk in a product of one
shape, over the keys up to the chunk's end. So it makes no difference which of a prompt's tokens are
read in this step and which were read before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from ratchet.engine.model.attention import (
    Attention,
    AttentionCall,
    LayerGroup,
    LoraLinear,
    attend_masked,
    bucket,
)
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.model.products import Pair, Products
from ratchet.engine.sampling.kv_cache import Cache, Pool
from ratchet.engine.sampling.requests import Prefill, SlotTable

CHUNK = 64

WIDE = 128
WIDE_ROWS = 4
"""A product over heads at least WIDE wide is padded to this number of queries. A product of four
such queries takes less time than a product of two or three. For narrower heads up to half of the
time would be spent on padding."""


@dataclass(slots=True)
class Chunks:
    """The chunks with one number, such as every prompt's second chunk, of prompts in one pool.

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
        """The number of keys: the keys up to the chunk's end, rounded up."""
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
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    keys: Sequence[torch.Tensor] = field(init=False)
    values: Sequence[torch.Tensor] = field(init=False)
    """By layer, [sequences · heads, capacity, width]; keys have the last two in turn."""

    def __post_init__(self) -> None:
        mine = self.pool.data[:, :, self.first : self.first + len(self.rows)].flatten(2, 3)
        self.keys, self.values = mine[0].transpose(2, 3).unbind(), mine[1].unbind()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values [sequences, heads, width]."""
        query = call.query.index_select(0, self.rows).mul_(call.scale)
        for which, packed in enumerate((call.key, call.value)):
            self.pool.store(which, call.layer, self.places, packed.index_select(0, self.rows))
        _, heads, width = call.key.shape
        count, shared = len(self.rows), query.shape[1] // heads
        grouped = query.view(-1, shared, width)
        if width >= WIDE:
            grouped = F.pad(grouped, (0, 0, 0, -shared % WIDE_ROWS))
        scores = torch.bmm(grouped, self.keys[call.layer])
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores.view(count, -1, self.pool.capacity).add_(self.mask(call.window))
        values = torch.bmm(scores.softmax(-1), self.values[call.layer])
        return values[:, :shared].reshape(count, -1, width)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return [sequences, 1, capacity]: 0 where the new token may attend, -inf elsewhere."""
        if (mask := self.masks.get(window)) is None:
            positions = torch.arange(self.pool.capacity, device=self.rows.device)
            behind = self.lengths[:, None] - positions
            hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
            mask = torch.zeros(hidden.shape, device=self.rows.device)
            mask = self.masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return mask


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
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, self.order)


def prompt_group(
    pool: Pool, prefills: list[Prefill], order: np.ndarray, offset: int
) -> tuple[PromptGroup, int]:
    """Group the prompts of a pool by chunk; fill `order` from `offset` on and return its end."""
    steps = np.arange(CHUNK)
    tables: dict[int, list[tuple[int, np.ndarray]]] = {}
    for one in prefills:
        known, length = one.known, len(one.prompt)
        for number in range(known // CHUNK, (length - 1) // CHUNK + 1):
            positions = number * CHUNK + steps
            read = (positions >= known) & (positions < length)
            rows = one.start + np.where(read, positions - known, 0)
            tables.setdefault(number, []).append((one.entry, np.where(read, rows, -1)))
    chunks = []
    for number, members in sorted(tables.items()):
        entries, rows = (np.array(column) for column in zip(*members, strict=True))
        order[rows[rows >= 0]] = offset + np.flatnonzero(rows >= 0)
        offset += rows.size
        some = rows.max(axis=1, keepdims=True)
        chunks.append(
            Chunks(number, _index(entries, pool), _index(np.where(rows < 0, some, rows), pool))
        )
    reading = [(one, np.arange(one.known, len(one.prompt))) for one in prefills]
    rows = np.concatenate([one.start + np.arange(len(span)) for one, span in reading])
    entries = np.concatenate([np.full(len(span), one.entry) for one, span in reading])
    places = pool.places(entries, np.concatenate([span for _, span in reading]))
    return PromptGroup(pool, _index(rows, pool), places, chunks), offset


def _index(numbers: np.ndarray, pool: Pool) -> torch.Tensor:
    return torch.from_numpy(numbers).to(pool.data.device)


ReadyLoras: TypeAlias = Mapping[LoraWeights, Mapping[str, torch.Tensor] | Mapping[str, Pair]]
"""LoRA → name of a group of layers → its weights as sampling takes them, merged or as a pair."""


@dataclass(frozen=True, slots=True)
class Share:
    """The rows from `start` up to `stop`, which belong to one LoRA (None: the base model)."""

    lora: LoraWeights | None
    start: int
    stop: int


@dataclass(slots=True)
class SamplingPass:
    """Rows of several LoRAs: `body` for the layers, `head` for the rows whose logits are needed.

    `ready` holds each LoRA's layers: the transposed weights with the update already added, or the
    pair that is computed beside the base weights.
    """

    products: Products
    body: list[Share]
    head: list[Share]
    attention: Attention
    ready: ReadyLoras
    last: tuple[LayerGroup, torch.Tensor, torch.Tensor] | None = None
    """The group that was computed last, its inputs and its outputs."""

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs [1, rows, in], as many as `round_up` gives, to [1, rows, out].

        The first layer of a group computes the outputs of all, which the others return.
        """
        group = layer.group
        if len(group.layers) == 1:
            return self.multiply(group, inputs)
        if self.last is None or self.last[0] is not group or self.last[1] is not inputs:
            self.last = (group, inputs, self.multiply(group, inputs))
        return self.last[2][..., layer.columns]

    def multiply(self, group: LayerGroup, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs [..., rows, in] to the outputs of a group."""
        shares = self.head if group.kind == "unembedding" else self.body
        if len(shares) == 1:
            outputs = self._multiply(shares[0].lora, group, inputs)
        else:
            parts = [
                self._multiply(one.lora, group, inputs[..., one.start : one.stop, :])
                for one in shares
            ]
            outputs = torch.cat(parts, -2)
        if group.bias is not None:
            outputs += group.bias
        return outputs

    def _multiply(
        self, lora: LoraWeights | None, group: LayerGroup, rows: torch.Tensor
    ) -> torch.Tensor:
        """Multiply one LoRA's rows [..., n, in] by a group's weights, without the bias."""
        own = None if lora is None else self.ready[lora].get(group.name)
        if isinstance(own, torch.Tensor):
            return self.products.multiply(rows, own)
        outputs = self.products.multiply(rows, group.packed)
        return outputs if own is None else self.products.update(outputs, rows, own)


@dataclass(frozen=True, slots=True)
class Part:
    """Running completions by LoRA, and prompts to read, that one thread computes in a step."""

    active: Mapping[LoraWeights | None, np.ndarray]
    prefills: list[Prefill]


def split(
    table: SlotTable,
    active: Mapping[LoraWeights | None, np.ndarray],
    prefills: list[Prefill],
    count: int,
) -> list[Part]:
    """Split a step into parts of about as many tokens, in each pool at a boundary of entries."""
    if count == 1:
        return [Part(active, prefills)]
    running = np.concatenate([*active.values(), np.empty(0, dtype=np.int64)])
    ordered = running[np.lexsort((table.entry[running], table.capacity[running]))]
    shares: list[list[Prefill]] = [[] for _ in range(count)]
    loads = [0] * count
    for prefill in sorted(prefills, key=lambda one: one.known - len(one.prompt)):
        least = loads.index(min(loads))
        shares[least].append(prefill)
        loads[least] += len(prefill.prompt) - prefill.known
    parts = []
    for mine, share in zip(np.array_split(ordered, count), shares, strict=True):
        kept = {lora: slots[np.isin(slots, mine)] for lora, slots in active.items()}
        parts.append(Part({lora: slots for lora, slots in kept.items() if len(slots)}, share))
    return [part for part in parts if part.active or part.prefills]


class Strip:
    """Concatenated numbers, padded at the end of each LoRA's share."""

    def __init__(self, round_up: Callable[[int], int]) -> None:
        self._round_up = round_up
        self.parts: list[np.ndarray] = []
        self.length = 0
        self.shares: list[Share] = []

    def add(self, numbers: np.ndarray) -> int:
        """Append numbers and return the place of the first one."""
        start = self.length
        self.parts.append(numbers)
        self.length += len(numbers)
        return start

    def end_share(self, lora: LoraWeights | None) -> None:
        start = self.shares[-1].stop if self.shares else 0
        rows = self.length - start
        self.add(np.zeros(self._round_up(rows) - rows, dtype=np.int64))
        self.shares.append(Share(lora, start, self.length))


class Row:
    """The packed row of one step: for each LoRA its running completions, then its prompts."""

    def __init__(
        self,
        table: SlotTable,
        caches: tuple[Cache, Cache],
        active: Mapping[LoraWeights | None, np.ndarray],
        prefills: list[Prefill],
        products: Products,
    ) -> None:
        self.table = table
        self.cache, self.prompts = caches
        self.device = self.cache.device
        self.products = products
        strips = (Strip(products.round_up) for _ in range(3))
        self.tokens, self.positions, self.heads = strips
        self.prefills = prefills
        self.loras = list(dict.fromkeys([*active, *(prefill.lora for prefill in prefills)]))
        nothing = np.empty(0, dtype=np.int64)
        running, places, heads = [], [], []
        for lora in self.loras:
            slots = active.get(lora, nothing)
            running.append(slots)
            places.append(np.arange(len(slots)) + self.tokens.add(table.last[slots]))
            self.positions.add(table.length[slots])
            heads.append(np.arange(len(slots)) + self.heads.add(places[-1]))
            for prefill in prefills:
                if prefill.lora is lora:
                    unread = prefill.prompt[prefill.known :]
                    prefill.start = self.tokens.add(np.array(unread, dtype=np.int64))
                    self.positions.add(np.arange(prefill.known, len(prefill.prompt)))
                    last = self.tokens.length - 1
                    needed = np.arange(prefill.start if prefill.whole else last, last + 1)
                    prefill.head = self.heads.add(needed)
            for strip in (self.tokens, self.positions, self.heads):
                strip.end_share(lora)
        self.running, self.places = np.concatenate(running), np.concatenate(places)
        self.running_heads = np.concatenate(heads)

    def inputs(self) -> Iterator[torch.Tensor]:
        """Yield tokens, positions, and the places of the tokens whose logits are needed."""
        for strip in (self.tokens, self.positions, self.heads):
            yield self._tensor(np.concatenate(strip.parts))

    def slots_and_heads(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots that draw a token, and their rows of logits."""
        slots, heads = [self.running], [self.running_heads]
        for prefill in self.prefills:
            last = prefill.head + (len(prefill.prompt) - 1 if prefill.whole else 0)
            for group in prefill.slots:
                slots.append(group)
                heads.append(np.full(len(group), last))
        return np.concatenate(slots), np.concatenate(heads)

    def sampling_pass(self, ready: ReadyLoras) -> SamplingPass:
        order = np.zeros(self.tokens.length, dtype=np.int64)
        offset = 0
        groups: list[PromptGroup | CachedGroup] = []
        read: dict[Pool, list[Prefill]] = {}
        for one in self.prefills:
            read.setdefault(self.prompts.pool(len(one.prompt)), []).append(one)
        for pool, prefills in read.items():
            prompts, offset = prompt_group(pool, prefills, order, offset)
            groups.append(prompts)
        for capacity in np.unique(self.table.capacity[self.running]):
            group, places = self._cached_group(int(capacity))
            groups.append(group)
            order[places] = np.arange(offset, offset + len(places))
            offset += len(places)
        attention = SamplingAttention(groups, self._tensor(order))
        return SamplingPass(self.products, self.tokens.shares, self.heads.shares, attention, ready)

    def _cached_group(self, capacity: int) -> tuple[CachedGroup, np.ndarray]:
        """Return the running completions in a pool, in the order of its entries, and their places.

        Their entries have no gaps, because every entry in use belongs to a part's completion.
        """
        mine = np.flatnonzero(self.table.capacity[self.running] == capacity)
        mine = mine[np.argsort(self.table.entry[self.running[mine]])]
        places, slots = self.places[mine], self.running[mine]
        entries, lengths = self.table.entry[slots], self.table.length[slots]
        pool = self.cache.pools[capacity]
        group = CachedGroup(
            pool,
            int(entries[0]),
            self._tensor(places),
            self._tensor(lengths),
            pool.places(entries, lengths),
        )
        return group, places

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device)
