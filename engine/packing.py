"""Completions under way and prompts to read → the packed row of one sampling step."""

from collections.abc import Mapping

import numpy as np
import torch

from engine.attention import Group, grouped
from engine.cache import Cache, CachedGroup, Deposit, SamplingAttention
from engine.jobs import Reading
from engine.lora import Lora
from engine.passes import TILE, SamplingPass, Tiles
from engine.seats import Seats


class Strip:
    """Numbers laid one after the other, filled up to whole tiles where a LoRA's share ends."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.length = 0
        self.tiles: list[Tiles] = []

    def add(self, numbers: np.ndarray) -> int:
        """Where they begin."""
        start = self.length
        self.parts.append(numbers)
        self.length += len(numbers)
        return start

    def close(self, lora: Lora | None) -> None:
        self.add(np.zeros(-self.length % TILE, dtype=np.int64))
        start = self.tiles[-1].stop if self.tiles else 0
        self.tiles.append(Tiles(lora, start, self.length // TILE))

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self.parts)).to(device)


class Row:
    """The packed row of one step: per LoRA its running completions, then its prompts."""

    def __init__(
        self,
        seats: Seats,
        cache: Cache,
        active: Mapping[Lora | None, np.ndarray],
        readings: list[Reading],
    ) -> None:
        self.seats = seats
        self.cache = cache
        self.device = cache.device
        self.tokens, self.positions, self.heads = Strip(), Strip(), Strip()
        self.readings = readings
        self.reading_starts = [0] * len(readings)
        self.reading_heads = [0] * len(readings)
        """Where each prompt's first needed row lies among the rows of logits."""
        self.loras = list(dict.fromkeys([*active, *(reading.lora for reading in readings)]))
        running, places, heads = [], [], []
        for lora in self.loras:
            if lora in active:
                places.append(self._lay_running(active[lora]))
                heads.append(np.arange(len(active[lora])) + self.heads.add(places[-1]))
                running.append(active[lora])
            for number, reading in enumerate(readings):
                if reading.lora is lora:
                    self._lay_reading(number, reading)
            for strip in (self.tokens, self.positions, self.heads):
                strip.close(lora)
        nothing = np.empty(0, dtype=np.int64)
        self.running = np.concatenate([*running, nothing])
        self.places = np.concatenate([*places, nothing])
        self.running_heads = np.concatenate([*heads, nothing])

    def _lay_running(self, seats: np.ndarray) -> np.ndarray:
        start = self.tokens.add(self.seats.last[seats])
        self.positions.add(self.seats.length[seats])
        return np.arange(start, start + len(seats))

    def _lay_reading(self, number: int, reading: Reading) -> None:
        start = self.tokens.add(reading.prompt)
        self.positions.add(np.arange(len(reading.prompt)))
        last = start + len(reading.prompt) - 1
        needed = np.arange(start if reading.whole else last, last + 1)
        self.reading_starts[number] = start
        self.reading_heads[number] = self.heads.add(needed)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens.tensor(self.device), self.positions.tensor(self.device)

    def head_rows(self) -> torch.Tensor:
        return self.heads.tensor(self.device)

    def drawing(self) -> tuple[np.ndarray, np.ndarray]:
        """Seats for which a token is drawn, and the rows of logits it is drawn from."""
        seats, heads = [self.running], [self.running_heads]
        for reading, head in zip(self.readings, self.reading_heads, strict=True):
            last = head + (len(reading.prompt) - 1 if reading.whole else 0)
            for group in reading.seats:
                seats.append(group)
                heads.append(np.full(len(group), last))
        return np.concatenate(seats), np.concatenate(heads)

    def sampling_pass(self, merged: Mapping[Lora, Mapping[str, torch.Tensor]]) -> SamplingPass:
        fresh, order, offset = self._fresh_groups()
        cached = []
        for capacity in np.unique(self.seats.capacity[self.running]):
            group, places = self._cached_group(int(capacity))
            cached.append(group)
            order[places] = np.arange(offset, offset + len(places))
            offset += len(places)
        attention = SamplingAttention(fresh, cached, self._tensor(order))
        return SamplingPass(self.tokens.tiles, self.heads.tiles, attention, merged)

    def _fresh_groups(self) -> tuple[list[tuple[Group, list[Deposit]]], np.ndarray, int]:
        """Groups of the prompts; the order of all tokens, so far as these decide it; its length."""
        lengths = [len(reading.prompt) for reading in self.readings]
        order = np.zeros(self.tokens.length, dtype=np.int64)
        groups, offset = [], 0
        for table, members in zip(*grouped(lengths, self.reading_starts), strict=True):
            for row, number in enumerate(members):
                start, begin = self.reading_starts[number], offset + row * table.shape[1]
                order[start : start + lengths[number]] = np.arange(begin, begin + lengths[number])
            offset += table.size
            groups.append((Group(self._tensor(table)), self._deposits(members)))
        return groups, order, offset

    def _deposits(self, members: list[int]) -> list[Deposit]:
        kept: dict[int, tuple[list[int], list[int]]] = {}
        for row, number in enumerate(members):
            for seat in np.concatenate(self.readings[number].seats):
                if self.seats.capacity[seat]:
                    rows, slots = kept.setdefault(int(self.seats.capacity[seat]), ([], []))
                    rows.append(row)
                    slots.append(int(self.seats.slot[seat]))
                    break
        return [
            Deposit(
                self.cache.pools[capacity],
                self._tensor(np.array(rows)),
                self._tensor(np.array(slots)),
            )
            for capacity, (rows, slots) in kept.items()
        ]

    def _cached_group(self, capacity: int) -> tuple[CachedGroup, np.ndarray]:
        """The running completions of one pool, in the order of its slots."""
        mine = np.flatnonzero(self.seats.capacity[self.running] == capacity)
        mine = mine[np.argsort(self.seats.slot[self.running[mine]])]
        places = self.places[mine]
        lengths = self.seats.length[self.running[mine]]
        pool = self.cache.pools[capacity]
        return CachedGroup(pool, self._tensor(places), self._tensor(lengths)), places

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device)
