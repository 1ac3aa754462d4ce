"""Processor cores of this machine that this process may use."""

import os


def usable_cores() -> int:
    """Return the number of cores to which the process is bound, or else of all."""
    bound = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(bound(0)) if bound else os.cpu_count() or 1
