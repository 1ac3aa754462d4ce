"""Ctrl-C and SIGTERM end a command in seconds, with one line, and nothing left running."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from benchmarks.interruptions.signals import Commands, stop_commands
from tests.support.processes import Warm, wait_until

HANGING = """
import subprocess, sys, threading, time
from ratchet.adapters.errors import UserError
from ratchet.flows.cli.main import plain_errors
from ratchet.flows.cli import signals
from ratchet.flows.cli.signals import ending_by_signals, explaining

signals.SAYING_SECONDS = 30  # a busy machine has time to say it
with plain_errors(), ending_by_signals(), explaining(lambda: "stopped in step 7 of 20"):
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(child.pid, flush=True)
    {work}
"""
"""A command with a child in a session of its own, as the engine is."""


@pytest.mark.parametrize(
    ("number", "status", "work"),
    [
        (signal.SIGINT, 130, "time.sleep(60)"),
        (signal.SIGTERM, 143, "time.sleep(60)"),
        (signal.SIGINT, 130, "try: time.sleep(60)\n    finally: threading.Event().wait()"),
        (signal.SIGTERM, 143, "try: time.sleep(60)\n    except BaseException: raise ValueError"),
        (signal.SIGINT, 130, "try: time.sleep(60)\n    except BaseException: raise UserError"),
        (
            signal.SIGTERM,
            143,
            "threading.Thread(target=time.sleep, args=(60,)).start(); time.sleep(60)",
        ),
    ],
)
def test_a_signal_ends_a_command_with_its_status_one_line_and_no_child(
    number: signal.Signals, status: int, work: str
) -> None:
    with start(HANGING.format(work=work)) as process:
        assert process.stdout is not None
        child = process.stdout.readline()
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (status, "ratchet: stopped in step 7 of 20\n")
    assert time.monotonic() - began < 30, "its work would take 60 s"
    wait_until("the child's end", lambda: not is_alive(child))


def test_a_signal_ends_a_command_that_is_done_while_python_exits() -> None:
    leaving = """
import atexit, time
from ratchet.flows.cli import commands, main

def app():
    atexit.register(lambda: [time.sleep(0.1) for _ in range(600)])
    atexit.register(print, "leaving", flush=True)

commands.app = app
main.main()
"""
    with start(leaving) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (143, "ratchet: stopped when its work was done\n")


@pytest.mark.parametrize(
    ("ending", "status"), [("pass", 0), ("sys.exit('no')", 1), ("raise UserError('no')", 2)]
)
def test_a_command_that_is_done_is_not_torn_down(ending: str, status: int) -> None:
    """Python gives the signals their own effects before it does, which can take seconds."""
    leaving = f"""
import atexit, sys, time
from ratchet.adapters.errors import UserError
from ratchet.flows.cli import commands, main

class Slow:
    def __del__(self):
        time.sleep(60)

def app():
    global kept
    kept = Slow()
    atexit.register(print, "leaving")
    {ending}

commands.app = app
main.main()
"""
    with start(leaving) as process:
        said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (status, "leaving\n")


def test_a_signal_counts_though_a_library_turns_what_its_handler_raises_into_an_error() -> None:
    failing = """
import signal, sys
from ratchet.flows.cli import signals
from ratchet.flows.cli.signals import ending_by_signals

signals.SAYING_SECONDS = 30

class Terminated(BaseException):
    pass

def raise_terminated(*_):
    raise Terminated

sys.setswitchinterval(60)  # the error arrives before any other thread has run
with ending_by_signals():
    signal.signal(signal.SIGTERM, raise_terminated)  # as Prefect does while a flow runs
    try:
        signal.raise_signal(signal.SIGTERM)
    except Terminated:
        raise RuntimeError("Query interrupted")  # as DuckDB does
"""
    with start(failing) as process:
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "ratchet: stopped\n")


def test_a_signal_in_an_import_ends_the_command_without_an_exception_in_the_module(
    tmp_path: Path,
) -> None:
    """An extension module may abort the process at an exception in its import."""
    (tmp_path / "slow.py").write_text("""
import os, time
print("begun", flush=True)
try:
    time.sleep(60)
except BaseException:
    os.abort()
""")
    importing = f"""
import sys
from ratchet.flows.cli import signals
from ratchet.flows.cli.signals import ending_by_signals, explaining

signals.SAYING_SECONDS = 30
sys.path.append({str(tmp_path)!r})
with ending_by_signals(), explaining(lambda: "stopped early"):
    import slow
"""
    with start(importing) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "ratchet: stopped early\n")


def test_a_process_that_is_started_again_when_it_is_killed_does_not_stay() -> None:
    starting = """
import subprocess, threading, time
from ratchet.flows.cli import signals
from ratchet.flows.cli.signals import ending_by_signals, explaining

signals.SAYING_SECONDS = 30

def start_again():
    while True:
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid, flush=True)
        child.wait()
        time.sleep(0.2)

def explain():
    time.sleep(0.7)
    return "stopped"

with ending_by_signals(), explaining(explain):
    threading.Thread(target=start_again, daemon=True).start()
    time.sleep(60)
"""
    with start(starting) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        others, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "ratchet: stopped\n")
    wait_until("the children's end", lambda: not any(map(is_alive, [first, *others.split()])))


@pytest.mark.parametrize(
    ("explain", "seconds", "printed"), [("endless", 1, ""), ("damaged", 30, "ratchet: stopped\n")]
)
def test_a_command_that_cannot_say_where_it_was_ends_all_the_same(
    explain: str, seconds: int, printed: str
) -> None:
    silent = f"""
import time
from ratchet.adapters.errors import UserError
from ratchet.flows.cli import signals
from ratchet.flows.cli.signals import ending_by_signals, explaining

signals.SAYING_SECONDS = {seconds}

def endless():
    time.sleep(60)

def damaged():
    raise UserError("metrics.jsonl is damaged")

with ending_by_signals(), explaining({explain}):
    print("begun", flush=True)
    time.sleep(60)
"""
    with start(silent) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, printed)


def test_a_forked_process_has_the_usual_effects_of_signals() -> None:
    forked = """
import os, signal, time
from ratchet.flows.cli.signals import ending_by_signals

with ending_by_signals():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"!")
        time.sleep(60)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)
    time.sleep(4)
"""
    with start(forked) as process:
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (0, f"{int(signal.SIGTERM)}\n", "")


@pytest.mark.parametrize("words", [["runs"], ["train", "hello"]])
def test_ctrl_c_while_a_command_begins_ends_it(words: list[str], tmp_path: Path) -> None:
    commands = Commands(tmp_path, Random(0))
    for after in (0, 0.3):
        ended = commands.stop(words, signal.SIGINT, after)
        faults = ended.faults() if ended else []
        assert [fault for fault in faults if " s to stop" not in fault] == []
        assert ended is None or ended.seconds < 30
    assert not [*tmp_path.glob("*/manifest.json")]


@pytest.mark.story
@pytest.mark.timeout(1800)
def test_commands_that_are_stopped_at_random_moments_end_in_time_and_go_on(tmp_path: Path) -> None:
    endings, faults = stop_commands(Commands(tmp_path, Random(1)), times=2)
    assert not faults, faults
    assert endings, "some come before the command's own end"


def start(program: str) -> Warm:
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Warm([sys.executable, "-c", program], **ends)


def is_alive(process: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(process)).status() != psutil.STATUS_ZOMBIE
    return False
