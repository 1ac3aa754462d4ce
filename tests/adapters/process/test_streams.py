"""Standard streams that are closed, whose reader has gone, or that lack letters fail no work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

WORK = """
import os, subprocess, sys
from flows.cli import commands, main

def app():
    print("0.21 \\u2192 0.39, \\xfc, \\udcff")
    print("x" * 100_000)
    sys.stdout.flush()
    print("a warning \\u2192", file=sys.stderr)
    with open(sys.argv[1], "w") as done:
        done.write(str(done.fileno() > 2))
    subprocess.run([sys.executable, "-c", "print('a child')"])
    raise SystemExit(int(sys.argv[2]))

commands.app = app
main.main()
"""


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize(
    "streams", ["", ">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"]
)
def test_work_ends_with_its_own_status_whatever_its_streams_are(
    tmp_path: Path, streams: str, status: int
) -> None:
    done = tmp_path / "done"
    command = f'exec "$@" {streams}'
    words = ["/bin/sh", "-c", command, "sh", sys.executable, "-c", WORK, str(done), str(status)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, done.read_text()) == (status, "True"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_reader_that_goes_away_fails_no_work(tmp_path: Path) -> None:
    done = tmp_path / "done"
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", WORK, str(done), "0"]
    ended = subprocess.run(words, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert ended.returncode == 0
    assert ended.stderr.startswith("a warning →\n")
    assert "flows/" not in ended.stderr, "the child alone has a stack trace"


def test_letters_that_a_stream_does_not_have_are_written_in_those_of_ascii(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", WORK, str(tmp_path / "done"), "0"]
    variables = {**os.environ, **locale, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, check=True)
    assert ended.stdout.startswith(b"0.21 -> 0.39, \\xfc, \\udcff\n")
    assert ended.stderr == b"a warning ->\n"


def test_a_result_that_a_full_disk_does_not_take_is_told() -> None:
    words = 'exec "$@" > /dev/full'
    program = [sys.executable, "-m", "flows.cli.main", "sql", "select 1"]
    asked = subprocess.run(
        ["/bin/sh", "-c", words, "sh", *program], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    said = "ratchet: stdout could not be written (No space left on device)\n"
    assert (asked.returncode, asked.stderr) == (1, said)
