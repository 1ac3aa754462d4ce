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
        self._bytes = 0
        self._lock = Lock()  # the event loop's thread looks up, the device thread loads

    def get(self, key: str) -> LoraWeights | None:
        with self._lock:
            if key in self._weights:
                self._weights.move_to_end(key)
            return self._weights.get(key)

    def put(self, key: str, lora: LoraWeights) -> None:
        with self._lock:
            self._remove(key)
            self._weights[key] = lora
            self._bytes += _size(lora)
            while self._bytes > self._budget_bytes and len(self._weights) > ALWAYS_KEPT:
                self._remove(next(iter(self._weights)))

    def remove(self, key: str) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: str) -> None:
        lora = self._weights.pop(key, None)
        if lora is not None:
            self._bytes -= _size(lora)


def _size(lora: LoraWeights) -> int:
    return sum(tensor.nbytes for tensor in lora.tensors.values())
