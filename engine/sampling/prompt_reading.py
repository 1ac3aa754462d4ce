"""The prompts that a step reads: what is known of them, and who receives their keys and values."""

import numpy as np
import torch

from engine.model.lora import LoraWeights
from engine.sampling.kv_cache import Cache, Pool
from engine.sampling.prompt_cache import PromptCache
from engine.sampling.requests import Prefill
from engine.sampling.slots import SlotTable


class PromptReader:
    """The entries of the prompts that are being read, and the cache of those that were."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, usual: int) -> None:
        self.cache = PromptCache(shape, device)
        self.entries = Cache(shape, device, usual)

    def prepare(self, lora: LoraWeights | None, prompt: list[int]) -> Prefill:
        """Return a prompt to read from its first token on that the cache does not know."""
        path, known = self.cache.find(lora, prompt)
        return Prefill(lora, prompt, path, known)

    def begin(self, prefills: list[Prefill]) -> None:
        """Give each prompt an entry, with the keys and values that are known.

        If the logits of every token are needed, nothing counts as known.
        """
        self.entries.clear()
        for prefill in prefills:
            pool = self.pool(prefill)
            (prefill.entry,) = pool.take(1)
            if prefill.whole:
                prefill.known = 0
            if prefill.known:
                self.cache.load(prefill.path, pool, prefill.entry)
            for job in prefill.jobs:
                if job.cached_tokens is None:
                    job.cached_tokens = prefill.known

    def pool(self, prefill: Prefill) -> Pool:
        return self.entries.pool(len(prefill.prompt))

    def finish(self, prefills: list[Prefill], table: SlotTable, cache: Cache) -> None:
        """Copy the prompts' keys and values to their completions and to the cache of prompts."""
        for prefill in prefills:
            pool = self.pool(prefill)
            slots = np.concatenate(prefill.slots)
            slots = slots[table.capacity[slots] > 0]
            if len(slots):
                entries = table.entry[slots]
                target = cache.pools[int(table.capacity[slots[0]])]
                target.copy(entries, pool, np.full(len(entries), prefill.entry))
            if not prefill.whole:
                self.cache.store(prefill.lora, prefill.prompt, pool, prefill.entry)
        self.entries.clear()
