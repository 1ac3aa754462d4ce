"""Threads that compute a step, in one of two ways.

Each of several threads computes a part of its own, or torch's own threads share every operation of
the whole. Parts share nothing until they are done, and each reads all weights. Shared operations
read each weight once, which is faster for few rows, but wait for each other, which takes several
times as long as soon as another program uses a core.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")

DISTURBED = 0.85
"""Share of its threads' time that a shared step uses if no other program delays it, at least."""

MOST_APART = 128
"""Bound on the steps that are not shared after a disturbed step: 1, and twice as many after each
further disturbed step in a row."""


class Workers:
    """Up to `count` threads; with one, everything is computed by the calling thread."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "compute", use_one_thread) if count > 1 else None
        self._apart, self._next_apart = 0, 1

    def compute(self, function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Return the function's result for each part; raise the first part's error, if any."""
        if self._threads is None or len(parts) < 2:
            return [function(part) for part in parts]
        return list(self._threads.map(function, parts))

    def may_share(self) -> bool:
        """Tell whether the next step may be shared: not soon after a disturbed step."""
        if self._apart:
            self._apart -= 1
            return False
        return self.count > 1

    def share(self, function: Callable[[Part], Result], whole: Part) -> Result:
        """Return the function's result; all threads compute each of its operations together."""
        began, used = time.perf_counter(), time.process_time()
        torch.set_num_threads(self.count)
        try:
            return function(whole)
        finally:
            use_one_thread()
            most = self.count * (time.perf_counter() - began)
            self._note(disturbed=time.process_time() - used < DISTURBED * most)

    def _note(self, disturbed: bool) -> None:
        self._apart = self._next_apart if disturbed else 0
        self._next_apart = min(2 * self._next_apart, MOST_APART) if disturbed else 1


def use_one_thread() -> None:
    """Have torch compute each operation of the calling thread in that thread alone."""
    torch.set_num_threads(1)
