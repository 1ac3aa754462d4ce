"""Threads that compute independent parts of one step, each with one thread of torch.

Parts share nothing until they are done, whereas torch's own threads wait for each other after every
operation, which is slow as soon as another program uses a core.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


class Workers:
    """Up to `count` threads; with one, everything is computed by the calling thread."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "compute", use_one_thread) if count > 1 else None

    def compute(self, function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Return the function's result for each part; raise the first part's error, if any."""
        if self._threads is None or len(parts) < 2:
            return [function(part) for part in parts]
        return list(self._threads.map(function, parts))


def use_one_thread() -> None:
    """Have torch compute each operation of the calling thread in that thread alone."""
    torch.set_num_threads(1)
