"""The keys and values of running sequences, in pools by capacity, and of prompts read before.

Prompts of one LoRA form a tree of blocks of constant size: prompts that begin alike share the
blocks of what they have in common. The blocks that were used least recently are overwritten first,
and the blocks of a LoRA that no longer exists are freed. A block holds exactly what reading its
tokens again would compute (`sampling_pass.py`), so no answer depends on what the cache holds.
"""

import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import psutil
import torch

from ratchet.engine.model.attention import bucket
from ratchet.engine.model.lora import LoraWeights

KEPT_POOL_BYTES = 2**28
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
        keep: int = KEPT_POOL_BYTES,
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

    A pool is made when a sequence needs it. A pool for more than `usual` tokens keeps no memory
    when it is empty, since few sequences are as long.
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
            keep = KEPT_POOL_BYTES if capacity <= self.usual else 0
            self.pools[capacity] = Pool(self.shape, capacity, self.device, keep)
        return self.pools[capacity]

    def clear(self) -> None:
        for pool in self.pools.values():
            pool.clear()


def _index(entries: np.ndarray, data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(entries).to(data.device)


BLOCK = 16
"""Tokens of a block. Only the last block of a prompt may hold fewer."""

MEMORY_SHARE = 1 / 16
"""Part of the machine's memory that the blocks may fill."""

FIRST_BLOCKS = 64


@dataclass(slots=True, eq=False)
class Block:
    """Tokens, the place of their keys and values, and the blocks that may follow them.

    The beginning of a tree has no tokens and no place.
    """

    tokens: tuple[int, ...] = ()
    place: int = -1
    parent: "Block | None" = None
    followers: dict[int, list["Block"]] = field(default_factory=dict)
    """First token → the blocks that follow and begin with it."""

    def best_follower(self, tokens: tuple[int, ...]) -> tuple["Block | None", int]:
        """Return the follower that shares most of the tokens' beginning, and how many it shares."""
        shared = [(_common(one.tokens, tokens), one) for one in self.followers.get(tokens[0], ())]
        number, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        return best, number


class PromptCache:
    """The blocks of all LoRAs, at most `most_bytes` of them; used by the device thread alone."""

    def __init__(
        self, shape: tuple[int, int, int], device: torch.device, most_bytes: int | None = None
    ) -> None:
        layers, heads, width = shape
        self.data = torch.zeros((2, layers, 0, heads, BLOCK, width), device=device)
        of_block = 2 * layers * heads * BLOCK * width * self.data.element_size()
        if most_bytes is None:
            most_bytes = int(psutil.virtual_memory().total * MEMORY_SHARE)
        self.most_blocks = most_bytes // of_block
        self._trees: weakref.WeakKeyDictionary[LoraWeights, Block] = weakref.WeakKeyDictionary()
        self._base = Block()
        self._used: OrderedDict[Block, None] = OrderedDict()
        """Blocks, least recently used first; a block stands before the block it follows."""
        self._free: list[int] = []
        self._orphans: deque[Block] = deque()
        """Trees whose LoRA was deleted, by whichever thread."""

    @property
    def count(self) -> int:
        """The number of blocks in use."""
        return len(self._used)

    def find(self, lora: LoraWeights | None, prompt: list[int]) -> tuple[list[Block], int]:
        """Return the blocks of the longest known beginning of a prompt, and its tokens' number.

        The last token always counts as unknown, because its logits are needed.
        """
        self._free_orphans()
        path: list[Block] = []
        block, known = self._tree(lora), 0
        while known < len(prompt):
            best, number = block.best_follower(tuple(prompt[known : known + BLOCK]))
            if best is None:
                break
            path.append(best)
            known += number
            if number < BLOCK:
                break
            block = best
        self._touch(path)
        return path, min(known, len(prompt) - 1)

    def load(self, path: list[Block], pool: Pool, entry: int) -> None:
        """Copy the blocks' keys and values to the beginning of a pool's entry."""
        found = self.data.index_select(2, self._places(path))
        tokens = found.transpose(2, 3).flatten(3, 4)
        pool.data[:, :, entry, :, : tokens.shape[3]] = tokens

    def store(self, lora: LoraWeights | None, prompt: list[int], pool: Pool, entry: int) -> None:
        """Keep the part of a prompt that is not known yet, from its entry in a pool."""
        path, new = self._grow_tree(lora, prompt)
        if new:
            first, count = len(path) - len(new), len(path)
            tokens = pool.data[:, :, entry, :, first * BLOCK : count * BLOCK]
            blocks = tokens.unflatten(3, (len(new), BLOCK)).transpose(2, 3)
            self.data.index_copy_(2, self._places(new), blocks)

    def _grow_tree(
        self, lora: LoraWeights | None, prompt: list[int]
    ) -> tuple[list[Block], list[Block]]:
        """Return the blocks of a prompt, as far as there is room, and the new blocks among them."""
        path: list[Block] = []
        new: list[Block] = []
        block = self._tree(lora)
        for start in range(0, len(prompt), BLOCK):
            tokens = tuple(prompt[start : start + BLOCK])
            best, number = block.best_follower(tokens)
            if best is None or number < len(tokens):
                place = self._take_place({*path})
                if place is None:
                    break
                best = self._follow(block, tokens, place)
                new.append(best)
            path.append(best)
            block = best
        self._touch(path)
        return path, new

    def _follow(self, block: Block, tokens: tuple[int, ...], place: int) -> Block:
        """Let a new block follow, in the place of followers that are a part of it."""
        for part in block.followers.get(tokens[0], [])[:]:
            if tokens[: len(part.tokens)] == part.tokens:
                self._forget(part)
        follower = Block(tokens, place, block)
        block.followers.setdefault(tokens[0], []).append(follower)
        self._used[follower] = None
        return follower

    def _take_place(self, needed: set[Block]) -> int | None:
        """Return a free place or, without one, the place of a block that is not needed."""
        if not self._free and len(self._used) < self.most_blocks:
            known = self.data.shape[2]
            count = min(self.most_blocks, max(FIRST_BLOCKS, 2 * known))
            data = self.data.new_zeros((*self.data.shape[:2], count, *self.data.shape[3:]))
            data[:, :, :known] = self.data
            self.data = data
            self._free = list(range(known, count))[::-1]
        if not self._free:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest in needed:
                return None
            self._forget(oldest)
        return self._free.pop()

    def _forget(self, block: Block) -> None:
        """Free the place of a block that nothing follows."""
        del self._used[block]
        self._free.append(block.place)
        if block.parent is not None:
            siblings = block.parent.followers[block.tokens[0]]
            siblings.remove(block)
            if not siblings:
                del block.parent.followers[block.tokens[0]]

    def _tree(self, lora: LoraWeights | None) -> Block:
        if lora is None:
            return self._base
        if lora not in self._trees:
            self._trees[lora] = Block()
            weakref.finalize(lora, self._orphans.append, self._trees[lora]).atexit = False
        return self._trees[lora]

    def _free_orphans(self) -> None:
        while self._orphans:
            waiting = [self._orphans.popleft()]
            while waiting:
                block = waiting.pop()
                waiting += [one for group in block.followers.values() for one in group]
                if block in self._used:
                    del self._used[block]
                    self._free.append(block.place)

    def _touch(self, path: list[Block]) -> None:
        for block in reversed(path):
            self._used.move_to_end(block)

    def _places(self, blocks: list[Block]) -> torch.Tensor:
        return torch.tensor([block.place for block in blocks], device=self.data.device)


def _common(known: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Count the tokens with which both begin."""
    pairs = zip(known, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
