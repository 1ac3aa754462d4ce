"""The garbage collector of a process that answers calls while it works."""

import gc
import sys
from functools import cache

THRESHOLDS = 5_000, 10, 15
"""Objects, and collections of the younger generation, until a generation is collected. Larger
numbers make longer pauses of what a step drops: with a third of 100, of a second and more."""


def settle_collector() -> None:
    """Exempt all objects that are alive from collection, if modules were imported since last time.

    A full collection of the objects of the imported libraries, a million, stops every thread of the
    process for 0.3 to 0.6 s.
    """
    _settle(len(sys.modules))


@cache
def _settle(_modules: int) -> None:
    gc.freeze()
    gc.collect()  # of nothing: a later full one waits for a quarter of what the last one has seen
    gc.set_threshold(*THRESHOLDS)
