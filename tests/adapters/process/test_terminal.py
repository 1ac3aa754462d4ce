"""What is printed: no control reaches a terminal, and no closed stream fails any work."""

import io
import os
import subprocess
import sys
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.process.terminal import hanging, on_one_line, show, visible, write_data
from ratchet.tasks.reports.tables import aligned, fitted, markdown_table
from tests.support.processes import ROOT

said = st.text(st.characters(codec=None)) | st.lists(
    st.sampled_from(
        ["\x1b[2J", "\r", "\r\n", "\n", "\t", "\x9b", "\u202e", "\u2028", "\ud800", "x|"]
    )
).map("".join)


def obeyed(text: str) -> set[str]:
    """Find what a terminal would obey or not show, but for joiners."""
    return {one for one in text if category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {
        *"\u200c\u200d"
    }


@given(said)
def test_whatever_is_printed_has_lines_and_tabs_and_no_other_control(text: str) -> None:
    show(text, stream := io.StringIO())
    assert obeyed(stream.getvalue()) <= {"\n", "\t"}
    assert visible(visible(text)) == visible(text)
    assert obeyed(on_one_line(text)) == set()


@given(said, said)
def test_a_cell_of_a_table_is_one_line_of_text(name: str, value: str) -> None:
    tables = aligned([name], [[value]]), fitted([name], [[value]], 100, [name])
    for table in (*tables, markdown_table([name], [[value]]).rstrip("\n")):
        assert obeyed(table) <= {"\n"}
    assert [table.count("\n") for table in tables] == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "two\nlines\tand a tab",
        "Grüße, 中文, \u0645\u06cc\u200c\u062e",
        "👩\u200d🚀 \u00a0",
        "\\x1b",
    ],
)
def test_what_is_only_read_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_a_control_is_written_as_python_does() -> None:
    assert (
        visible("\x1b[31m\r\n\r\u202e\U000e0041\ud800") == r"\x1b[31m"
        "\n"
        r"\r\u202e\U000e0041\ud800"
    )
    assert on_one_line("a\r\n\tb") == r"a\r\n\tb"


def test_only_the_first_line_of_what_hangs_begins_at_the_margin() -> None:
    assert hanging("error  a\n\nb\n c", 2) == "error  a\n\n  b\n   c"
    assert hanging("") == ""


@pytest.mark.parametrize(
    ("is_terminal", "written"), [(True, b"a,\\x1b[2J\n"), (False, b"a,\x1b[2J\n")]
)
def test_data_is_exact_for_a_program_and_text_in_a_terminal(
    is_terminal: bool, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    write_data(b"a,\x1b[2J\n")
    assert stream.buffer.getvalue() == written


WORK = """
import os, subprocess, sys
from ratchet.flows.cli import commands, main

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
@pytest.mark.parametrize("streams", ["", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_work_ends_with_its_own_status_whatever_its_streams_are(
    tmp_path: Path, streams: str, status: int
) -> None:
    done = tmp_path / "done"
    command = f'exec "$@" {streams}'
    words = ["/bin/sh", "-c", command, "sh", sys.executable, "-c", WORK, str(done), str(status)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, done.read_text()) == (status, "True"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_letters_that_a_stream_does_not_have_are_written_as_escapes(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", WORK, str(tmp_path / "done"), "0"]
    variables = {**os.environ, **locale, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, check=True)
    assert ended.stdout.startswith(b"0.21 \\u2192 0.39, \\xfc, \\udcff\n")
    assert ended.stderr == b"a warning \\u2192\n"
