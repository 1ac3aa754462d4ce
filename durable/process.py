"""A process that answers calls while it works: its garbage collector, cores, working folder."""

import gc
import os
import sys
from functools import cache
from pathlib import Path

THRESHOLDS = 5_000, 10, 15
"""Objects, and collections of the younger generation, until a generation is collected. Larger
numbers make longer pauses of a batch's rollouts."""
FEW, MANY = 500, 10
"""New objects for which nothing is collected, and collections of the young after which all are."""


def collect_garbage() -> None:
    """Collect the garbage that there is, before more comes with a batch, or after a step.

    HTTP clients leave some 40 objects of a call in cycles, so that a pause grows with the calls
    since the last full collection. All objects that are alive are exempt from collection if modules
    were imported since last time: the objects of the imported libraries are a million, and looking
    through them stops every thread of the process for 0.3 to 0.6 s.
    """
    _exempt(len(sys.modules))
    gc.collect()


def collect_while_idle() -> None:
    """Collect young garbage if there may be some; a process that has nothing to do may ask often.

    What is collected now is not collected while somebody waits. Old garbage, whose search takes
    longer the more objects are alive, is collected before the collector would do so by itself.
    """
    young, middle, old = gc.get_count()
    if old >= MANY:
        collect_garbage()
    elif middle or young > FEW:
        gc.collect(1)


@cache
def _exempt(_modules: int) -> None:
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def usable_cores() -> int:
    """Return the number of cores to which the process is bound, or else of all."""
    bound = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(bound(0)) if bound else os.cpu_count() or 1


held_folders: list[Path] = []
"""The working folder, once for each agent that plays and may leave this process in another one."""


def working_folder() -> Path:
    """Return the folder in which this process was begun, wherever an agent has left it."""
    return held_folders[0] if held_folders else Path.cwd()
