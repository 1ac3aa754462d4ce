"""Waiting for other processes, and ports for them."""

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port on which nobody listens, and which the kernel gives nobody by itself."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 50):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("all of 50 ports are in use")


def wait_until(what: str, happened: Callable[[], bool], seconds: float = 60) -> float:
    """Wait until something has happened; return for how long."""
    started = time.monotonic()
    while not happened():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - started
