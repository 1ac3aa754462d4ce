"""What commands say: refusals of one line, and warnings above the bar."""

import logging
import sys
from pathlib import Path

import pytest
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console

from benchmarks.pictures.terminal import RATCHET
from ratchet.flows.cli.progress_bar import logs_printed_to, show_progress
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import run

WRONG = (*RATCHET, "train", "hello", "--set", "steps=0", "--set", "epochs=0")
SAID = (
    "ratchet: recipe: steps 0 with epochs 0: give one of them, since a run is as long as "
    "either says"
)


def test_a_refusal_is_one_line_in_a_file(tmp_path: Path) -> None:
    [line] = run(WRONG[1:], cwd=tmp_path, env={}).stderr.splitlines()
    assert line.startswith(SAID)


def test_a_warning_above_the_bar_has_its_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, log = PrefectConsoleHandler(sys.stderr), logging.getLogger(__name__)
    log.addHandler(handler)
    try:
        with show_progress({RunFolder(tmp_path / "run"): 2}), logs_printed_to(Console()):
            log.warning("KeyError: '[/red]' \x1b[2J")
    finally:
        log.removeHandler(handler)
    assert "KeyError: '[/red]' \\x1b[2J\n" in capsys.readouterr().err
