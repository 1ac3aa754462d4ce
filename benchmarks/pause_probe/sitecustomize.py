"""Measures the pauses of this process; Python imports it at its start.

A folder on PYTHONPATH that holds this file is enough. A thread wakes every INTERVAL seconds, and
what it is late, without the time in which another process had its processor, is a pause: something
held the interpreter's lock, or waited for a processor while it held it. At each pause of SHORTEST
seconds the process adds a line to the file PAUSES_FILE: its own number, its command, the time, the
pause, the processor seconds that the garbage collector took of it, and its memory in bytes.
"""

import gc
import json
import os
import threading
import time
from pathlib import Path

INTERVAL = 0.005
SHORTEST = 0.02
FILE = os.environ.get("PAUSES_FILE", "")

collected: list[float] = []
"""Processor seconds of the collections since the thread woke last."""


def _waited() -> float:
    """Return the seconds for which this thread was ready and had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


begun: list[float] = []
"""When the collection under way began, in processor seconds of its thread."""


def _time_collection(phase: str, _: object) -> None:
    if phase == "start":
        begun.append(time.thread_time())
    elif begun:
        collected.append(time.thread_time() - begun.pop())


def _watch(command: str) -> None:
    with Path(FILE).open("a", buffering=1, encoding="utf-8") as file:
        now, waited = time.monotonic(), _waited()
        while True:
            time.sleep(INTERVAL)
            before, now = now, time.monotonic()
            waited_before, waited = waited, _waited()
            collecting = sum(collected)
            collected.clear()
            late = now - before - INTERVAL - (waited - waited_before)
            if late >= SHORTEST:
                line = [os.getpid(), command, time.time(), late, collecting, _memory()]
                file.write(json.dumps(line) + "\n")


if FILE:
    command = Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()
    gc.callbacks.append(_time_collection)
    threading.Thread(target=_watch, args=(command,), daemon=True).start()
