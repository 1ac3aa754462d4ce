"""The packed row of tokens that one sampling step computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engine.model.lora import LoraWeights
from engine.model.products import Products
from engine.sampling.cached_attention import (
    CachedGroup,
    PromptGroup,
    Reading,
    SamplingAttention,
    prompt_group,
)
from engine.sampling.kv_cache import Cache, Pool
from engine.sampling.requests import Prefill
from engine.sampling.sampling_pass import ReadyLoras, SamplingPass, Share
from engine.sampling.slots import SlotTable


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
    """Concatenated numbers, padded to a multiple of `granule` at the end of each LoRA's share."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
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
        self.add(np.zeros(-self.length % self.granule, dtype=np.int64))
        start = self.shares[-1].stop if self.shares else 0
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
        strips = (Strip(products.granule) for _ in range(3))
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
                    self._add_prefill(prefill)
            for strip in (self.tokens, self.positions, self.heads):
                strip.end_share(lora)
        self.running, self.places = np.concatenate(running), np.concatenate(places)
        self.running_heads = np.concatenate(heads)

    def _add_prefill(self, prefill: Prefill) -> None:
        prefill.start = self.tokens.add(np.array(prefill.prompt[prefill.known :], dtype=np.int64))
        self.positions.add(np.arange(prefill.known, len(prefill.prompt)))
        last = self.tokens.length - 1
        needed = np.arange(prefill.start if prefill.whole else last, last + 1)
        prefill.head = self.heads.add(needed)

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
        for pool, readings in self._readings().items():
            prompts, offset = prompt_group(pool, readings, order, offset)
            groups.append(prompts)
        for capacity in np.unique(self.table.capacity[self.running]):
            group, places = self._cached_group(int(capacity))
            groups.append(group)
            order[places] = np.arange(offset, offset + len(places))
            offset += len(places)
        attention = SamplingAttention(groups, self._tensor(order))
        return SamplingPass(self.products, self.tokens.shares, self.heads.shares, attention, ready)

    def _readings(self) -> dict[Pool, list[Reading]]:
        found: dict[Pool, list[Reading]] = {}
        for prefill in self.prefills:
            length = len(prefill.prompt)
            reading = Reading(prefill.entry, prefill.known, length, prefill.start)
            found.setdefault(self.prompts.pool(length), []).append(reading)
        return found

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
