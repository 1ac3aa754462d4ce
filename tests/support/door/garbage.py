"""The garbage collector, switched off to show what leaves memory without it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect no garbage meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
