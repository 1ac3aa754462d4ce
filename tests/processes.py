"""Waiting for other processes, and ports for them."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(what: str, happened: Callable[[], bool], seconds: float = 60) -> float:
    """Wait until something has happened; return for how long."""
    started = time.monotonic()
    while not happened():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - started
