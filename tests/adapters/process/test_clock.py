"""The running clock stands still while its process does, and says so."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from ratchet.adapters.process.clock import LONGEST_TICK, WORTH_A_WORD

STILL_SECONDS = WORTH_A_WORD + 1

PROGRAM = """
import sys, time
from ratchet.adapters.process.clock import running_clock
clock = running_clock()
print(time.monotonic(), clock.seconds(), clock.stood_still(), flush=True)
sys.stdin.readline()
print(time.monotonic(), clock.seconds(), clock.stood_still(), flush=True)
time.sleep(3)
print(time.monotonic(), clock.seconds(), clock.stood_still(), flush=True)
"""


def test_a_stopped_process_counts_no_time_and_warns_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None

        def read() -> list[float]:
            assert process.stdout is not None
            return [float(number) for number in process.stdout.readline().split()]

        began, before, still_before = read()
        process.send_signal(signal.SIGSTOP)
        time.sleep(STILL_SECONDS)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        ended, after, still_after = read()
        passed = ended - began
        assert after - before <= passed - STILL_SECONDS + LONGEST_TICK + 0.5
        assert STILL_SECONDS - LONGEST_TICK - 0.5 <= still_after - still_before <= passed
        _, last, still_last = read()
        assert last > after
        assert still_last - still_after < STILL_SECONDS / 2
        warnings = process.stderr.read()
        assert warnings.count("this process stood still for") == 1


def test_a_process_that_runs_counts_all_of_its_time() -> None:
    program = PROGRAM.replace("sys.stdin.readline()", "time.sleep(2)")
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, _ = (float(line.split()[1]) for line in ran.stdout.splitlines())
    assert second - first >= 1.5
    assert ran.stderr == ""
