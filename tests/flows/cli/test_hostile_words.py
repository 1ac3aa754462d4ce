"""Words of agents, data and models in a terminal: text, whatever characters they have."""

import ast
import re
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.adapters.process.terminal import show
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.main import show_trace
from ratchet.flows.cli.training import _closing_lines
from ratchet.flows.opening.flow_runs import RunSummary
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.transcripts import read_transcripts
from ratchet.tasks.reports.dryruns import _list_spans, _show_best
from ratchet.tasks.reports.progress import ProgressReader, describe_run
from ratchet.tasks.reports.tables import _shown, scores_table
from ratchet.tasks.storage.run_folder import RunFolder
from tests.tasks.test_journal import NOON
from tests.tasks.test_report_page import answered, begin_run, record_step, rewarded
from tests.tasks.test_reports import rollout, sealed

ROOT = Path(__file__).parents[3]
CONTROLS = [*range(10), *range(11, 32), *range(127, 160), 0x61C, 0x200B, 0x200F, 0x2028, 0x2029]
CONTROLS += [0x202E, 0x2066, 0x2069, 0xFEFF, 0xE0041]
HOSTILE = "".join(map(chr, CONTROLS)) + "\x1b]0;ran\x07\x1b[2J\rtrained\nserve   evil"
OBEYED = re.compile(f"[{re.escape(''.join(map(chr, CONTROLS)).replace(chr(9), ''))}]")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def hostile() -> RunFolder:
    """A run whose agent, examples and model say HOSTILE wherever they say something."""
    run = begin_run("hostile")
    example = {"attributes": {"example_id": 0, "example": {"question": HOSTILE, HOSTILE: 1}}}
    asked = [{"role": "user", "content": HOSTILE}]
    error = {"kind": "error", "error_type": "ValueError", "error_message": HOSTILE}
    ended = error | {"started": NOON, "ended": NOON + timedelta(seconds=1)}
    record_step(
        run,
        0,
        rollout(0, answered(HOSTILE, messages=asked), rewarded(1.0) | example),
        rollout(1, answered(HOSTILE), rewarded(0.0) | example),
    )
    sealed(run.spans("train-00001.0"), rollout(2, answered(HOSTILE), ended, step=1))
    run.journal("train-00001.0").touch()
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["runs"],
        ["sql", "from failures"],
        ["sql", "from rollouts"],
        ["sql", "select error_message from spans"],
        ["sql", f'select 1 as "{HOSTILE.replace(chr(0), "")}"'],
    ],
    ids=lambda command: command[1][:20] if command[1:] else command[0],
)
def test_a_command_that_reads_runs_shows_their_words_as_text(
    hostile: RunFolder, command: list[str]
) -> None:
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert not OBEYED.search(shown.output)
    if command != ["sql", "from rollouts"]:
        assert "\\x1b[2J" in shown.output.replace("\n", "")


def test_an_error_has_no_line_that_looks_like_a_command_s_own(hostile: RunFolder) -> None:
    listed = CliRunner().invoke(app, ["runs"]).output
    for said in (listed, _closing_lines(summary(), hostile, "1 s"), tried(hostile)):
        assert "evil" in said
        assert not re.search(r"^serve +evil", said, re.M)


def test_data_for_programs_is_exact(hostile: RunFolder) -> None:
    statement = "select error_message from spans where kind = 'error'"
    shown = CliRunner().invoke(app, ["sql", statement, "--format", "csv"])
    assert HOSTILE in shown.stdout_bytes.decode()


def summary() -> RunSummary:
    return RunSummary(run="x", steps=1, before=0, after=1, seconds=1, failed=1, error=HOSTILE)


def scores() -> str:
    measures = {f"measure/{HOSTILE}": 1.0}
    return scores_table(
        {HOSTILE: score_outcomes([ScoredRollout("a", 1.0, HOSTILE, measures=measures)])}
    )


def watched(run: RunFolder) -> str:
    return describe_run(run, ProgressReader(run).look(), is_open=True)


def tried(run: RunFolder) -> str:
    batches = run.sealed("train-00001")
    return "\n\n".join([_list_spans(batches), _show_best(read_transcripts(batches))])


RENDERED = {
    "train and resume": lambda run: _closing_lines(summary(), run, "1 s"),
    "evaluate": lambda run: scores(),
    "watch": watched,
    "compare": lambda run: _shown(HOSTILE),
    "dryrun": tried,
}


@pytest.mark.parametrize("rendered", RENDERED.values(), ids=RENDERED)
@pytest.mark.parametrize("printing", [show])
def test_what_a_command_says_of_a_run_has_no_character_that_a_terminal_obeys(
    hostile: RunFolder, rendered: Any, printing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    printing(rendered(hostile))
    said = capsys.readouterr().out
    assert "\\x1b[2J" in said
    assert not OBEYED.search(said)


def test_a_stack_trace_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_trace(ValueError, error := ValueError(HOSTILE), None)
    said = capsys.readouterr().err
    assert not OBEYED.search(said)
    show_trace(ValueError, plain := ValueError("plain"), None)
    assert capsys.readouterr().err == "".join(traceback.format_exception(plain))
    assert str(error) == HOSTILE


PRINTING = re.compile(r"(.*\.)?(print|print_exc\w*|echo|secho)|sys\.std.*write")
OWN = {"flows/cli/progress_bar.py": "it prints above what is live, by `visible`"}


@pytest.mark.parametrize("file", sorted(ROOT.glob("flows/**/*.py")), ids=lambda file: file.name)
def test_what_a_flow_or_a_command_prints_goes_through_the_terminal(file: Path) -> None:
    if str(file.relative_to(ROOT)) in OWN or "template" in file.parts:
        return
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert [said for call in calls if PRINTING.fullmatch(said := ast.unparse(call.func))] == []
