"""LRU cache of the LoRA weights that sampling sessions use, limited in bytes."""

from collections import OrderedDict
from threading import Lock

from engine.model.lora import LoraWeights

BUDGET_BYTES = 2**30
ALWAYS_KEPT = 4  # a policy, its predecessor and two for comparison, whatever their size


class ResidentWeights:
    """LoRA weights by key. Saved weights can be loaded again; an evicted snapshot is lost."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._weights: OrderedDict[str, LoraWeights] = OrderedDict()
        self._lock = Lock()  # the event loop's thread looks up, the device thread loads

    def get(self, key: str) -> LoraWeights | None:
        with self._lock:
            if key in self._weights:
                self._weights.move_to_end(key)
            return self._weights.get(key)

    def put(self, key: str, lora: LoraWeights) -> None:
        with self._lock:
            self._weights[key] = lora
            self._weights.move_to_end(key)
            size = sum(weights.nbytes for weights in self._weights.values())
            while size > self._budget_bytes and len(self._weights) > ALWAYS_KEPT:
                _, evicted = self._weights.popitem(last=False)
                size -= evicted.nbytes

    def remove(self, key: str) -> None:
        with self._lock:
            self._weights.pop(key, None)
