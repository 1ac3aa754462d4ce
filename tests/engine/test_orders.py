"""The folders that an engine is told to serve, one after the other."""

import subprocess
import sys
import threading

from ratchet.engine.__main__ import Orders


def test_a_line_ends_the_serving_before_it_and_names_the_next_folder() -> None:
    orders = Orders()
    orders.add("one")
    assert orders.next() == "one"
    assert not orders.stopped.is_set()
    first = orders.stopped
    orders.add("")
    assert first.is_set()
    orders.add("two")
    assert orders.next() == "two"
    assert not orders.stopped.is_set()


def test_a_line_that_comes_before_a_folder_is_served_ends_it_at_once() -> None:
    orders = Orders()
    orders.add("one")
    orders.add("two")
    assert orders.next() == "one"
    assert orders.stopped.is_set()
    assert orders.next() == "two"
    orders.add(None)
    assert orders.stopped.is_set()
    assert orders.next() is None


def test_a_wait_ends_with_a_line_of_another_thread() -> None:
    orders = Orders()
    threading.Timer(0.1, orders.add, ["late"]).start()
    assert orders.next() == "late"


def test_an_engine_without_a_folder_whose_threads_cannot_run_ends_itself() -> None:
    """A call that keeps the interpreter's lock stands for a thread that has died with it."""
    stuck = """
import ctypes, sys, threading
from ratchet.engine import __main__ as engine

engine.STUCK_SECONDS = 0.5
threading.Timer(1, ctypes.PyDLL(None).sleep, [600]).start()
engine.Orders().next()
"""
    ended = subprocess.run([sys.executable, "-c", stuck], capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"Timeout" in ended.stderr
