"""`ratchet sql` answers questions about runs, and can neither read nor write other files."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from math import exp
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.queries import answer_query
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.recording.views import GIVEN_VIEWS, VIEWS
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import folder_of
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, write_datums
from tests.tasks.test_journal import NOON
from tests.tasks.test_reports import ended, rollout, said, sealed

DOCUMENT = Path(__file__).parents[2] / "docs" / "sql.md"
TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
QUESTIONS = dict(
    re.findall(r"\n([^\n]+)\n\n```sql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.S)
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two runs. In `hello`: rewards 1, 0 and a failure in step 0; then 1 and 1. `new` has begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    for name in ("hello", "new"):
        recipe = {"agent": "hello", "steps": 2, "dataset": {"path": __file__}}
        recipe |= {"model": {"base": str(TINY)}}
        write_manifest(folder_of(name), recipe, "f00d")
    run = folder_of("hello")
    steps = [
        [
            rollout(0, call("Be 7.", "I am 7", logprobs=[-2.0, -1.0, -1.0]), ended(1.0)),
            rollout(1, call("Be 7.", "I am not sure"), ended(0.0)),
            rollout(2, call("Be 7.", "I"), ended(None)),
        ],
        [rollout(k, call("Be 8.", "I am 8"), ended(1.0), step=1) for k in range(2)],
    ]
    for step, rollouts in enumerate(steps):
        spans = [
            sealed(run.spans(f"train-{step:05d}.{batch}"), *rollouts[batch::2]) for batch in (0, 1)
        ]
        trajectories = run.trajectories(POLICY, step)
        assemble_trajectories.make(trajectories, spans)
        write_datums(run.datums(POLICY, step), trajectories, credited("centred"))
        record_metrics(run.metrics, step, {"reward/mean": 0.5 + step / 2, "tokens/sampled": 7})
    held_out = score_outcomes([ScoredRollout("a", 1.0, "bird"), ScoredRollout("b", 0.0)])
    write_json(run.evaluation("00002"), {"sampled": held_out.model_dump(mode="json")})
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "no statement writes a file"


def call(question: str, answer: str, **columns: object) -> dict:
    """A call that took two seconds."""
    return said(question, answer) | {
        "started": NOON,
        "ended": NOON + timedelta(seconds=2),
        "gen_ai_usage_output_tokens": len(answer.split()),
        "gen_ai_response_finish_reasons": ["stop"],
        **columns,
    }


def ask(statement: str, *names: str) -> list[tuple]:
    """Return the rows of a statement over runs, by way of JSON."""
    runs = [folder_of(name) for name in names or ("hello", "new")]
    return [tuple(row.values()) for row in json.loads(answer_query(statement, runs, "json"))]


def text_of(token: int) -> str:
    return TOKENIZER.decode([token], skip_special_tokens=False)


ANSWERS = [
    [
        ("hello", 0, 0.5, None, None, None),
        ("hello", 1, 1.0, None, None, None),
        ("hello", 2, None, 0.5, pytest.approx(0.0945, abs=1e-4), pytest.approx(0.9055, abs=1e-4)),
    ],
    [("hello", 0.5, 14)],
    [
        ("hello", "train-00000-0000-01", 0.0, "Be 7. → I am not sure"),
        ("hello", "train-00000-0000-00", 1.0, "Be 7. → I am 7"),
        ("hello", "train-00001-0000-00", 1.0, "Be 8. → I am 8"),
        ("hello", "train-00001-0000-01", 1.0, "Be 8. → I am 8"),
    ],
    [("hello", "TimeoutError", 1, "too late")],
    [("hello", 0, 0.0, 0.0), ("hello", 1, 1.0, 1.0)],
    [("hello", None, 2, 1.0, 1.0)],
    [("hello", 0, 8, 7, 0.875), ("hello", 1, 6, 0, 0.0)],
    [("hello", 0, "stop", 3, pytest.approx(8 / 3), 0.5), ("hello", 1, "stop", 2, 3.0, 1.0)],
    [("hello", "policy", 5, 10.0, 2.0, None)],
    [
        ("hello", 0, rollout_id, token, text_of(token), advantage, pytest.approx(exp(logprob)))
        for rollout_id, token, advantage, logprob in [
            ("train-00000-0000-00", 0, 0.5, -2),
            ("train-00000-0000-00", 1, 0.5, -1),
            ("train-00000-0000-00", 2, 0.5, -1),
            ("train-00000-0000-01", 0, -0.5, -1),
            ("train-00000-0000-01", 1, -0.5, -1),
            ("train-00000-0000-01", 2, -0.5, -1),
            ("train-00000-0000-01", 3, -0.5, -1),
        ]
    ],
]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("question", "rows"), [*zip(QUESTIONS, ANSWERS, strict=True)], ids=list(QUESTIONS)
)
def test_a_question_of_the_document_is_answered(question: str, rows: list[tuple]) -> None:
    assert ask(QUESTIONS[question]) == rows


@pytest.mark.usefixtures("runs")
def test_every_view_is_of_one_run_or_of_all() -> None:
    lacking = (*GIVEN_VIEWS, "expert", "verdicts", "comparisons")
    for view in (view for view in VIEWS if view not in lacking):
        assert {row[0] for row in ask(f"from {view}")} == {"hello"}
    for view in ("spans", "calls", "rollouts", "groups", "evaluations"):
        assert ask(f"from {view}", "new") == [], "a run that has just begun"
    with pytest.raises(UserError, match=r"a run has steps, trajectories, datums and tokens"):
        ask("from datums", "new")


FORBIDDEN = [
    "copy spans to 'out.csv'",
    "copy spans to 'runs/hello/metrics.jsonl' (format json)",
    "copy rollouts to 'runs/hello/spans/train-00000.0.parquet' (use_tmp_file false)",
    "with written as (copy spans to 'out.csv') from written",
    "explain analyze copy spans to 'out.csv'",
    "export database 'out'",
    "attach 'out.db'",
    "install httpfs",
    "load httpfs",
    "from read_text('/etc/passwd')",
    "from '/etc/passwd'",
    "from read_csv('/etc/passwd')",
    "from glob('/etc/*')",
    "from 'runs/hello/metrics.jsonl'",
    "from 'http://127.0.0.1:9/rows.parquet'",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma enable_profiling = 'json'; set profiling_output = 'out.json'; select 1",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_a_statement_can_open_no_file(runs: Path, statement: str) -> None:
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"disabled (by|through) config|locked|/etc/passwd does"):
        ask(statement, "hello")
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("runs")
def test_what_this_process_holds_in_its_variables_is_no_table() -> None:
    with pytest.raises(UserError, match="Table with name FORBIDDEN does not exist"):
        ask("from FORBIDDEN")


@pytest.mark.usefixtures("runs")
def test_a_refusal_says_what_to_do_instead() -> None:
    with pytest.raises(UserError, match=r"reads the views spans, .*--out write its rows to a file"):
        ask("copy spans to 'out.csv'")


def test_rows_are_written_as_a_table_csv_json_and_parquet(
    runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    statement = (
        "select 'a, b' as text, [1, 2] as list, null as nothing, 'nan'::double as nan, "
        "reply from spans where kind = 'llm' order by rollout_id limit 1"
    )
    reply = {"role": "assistant", "content": "I am 7"}

    def written(*options: str) -> bytes:
        result = CliRunner().invoke(app, ["sql", statement, "--run", "hello", *options])
        assert result.exit_code == 0, result.output
        return result.stdout_bytes

    table = written().decode().splitlines()
    assert re.fullmatch(r"a, b +\[1, 2\] +- +nan +\{.*", table[2])
    assert written("--format", "csv").decode() == (
        'text,list,nothing,nan,reply\n"a, b","[1, 2]",,,"'
        + json.dumps(reply).replace('"', '""')
        + '"\n'
    )
    assert json.loads(written("--format", "json")) == [
        {"text": "a, b", "list": [1, 2], "nothing": None, "nan": None, "reply": reply}
    ]
    out = tmp_path_factory.mktemp("out") / "rows.parquet"
    assert written("--format", "parquet", "--out", str(out)) == b""
    assert written("--format", "parquet") == out.read_bytes()
    assert pq.read_table(out).to_pylist()[0]["list"] == [1, 2]


def table_of(statement: str, monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> list[str]:
    """Return the lines of a table on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, ["sql", statement, "--run", "hello"])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("columns", [80, 100])
def test_a_table_fits_the_terminal_and_breaks_at_words_and_lines(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a word and another " * 8
    query = f"select 1/3 as third, 1e-5 as rate, 'x' || chr(10) || 'y' as lines, '{text}' as text"
    head, _, *rows = table_of(query, monkeypatch, columns)
    assert head.split() == ["third", "rate", "lines", "text"]
    assert all(len(row) <= columns for row in rows)
    assert rows[0].split()[:3] == ["0.333", "1e-05", "x"]
    assert rows[1].split()[0] == "y"
    assert " ".join(row[row.index("a word") :] for row in rows[:1]).count("word") >= 2


@pytest.mark.usefixtures("runs")
def test_a_token_is_shown_with_its_text_and_what_it_was_trained_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = (
        "select place, token, text, sampled, logprob, advantage from tokens "
        "where step = {} and rollout_id like '%-00' order by place"
    )
    head, _, *rows = table_of(query.format(0), monkeypatch)
    assert head.split() == ["place", "token", "text", "sampled", "logprob", "advantage"]
    given, sampled = rows[:3], rows[3:]
    assert [row.split() for row in given] == [
        [str(token), str(token), text_of(token).strip(), "False", "-", "-"] for token in (1, 2, 3)
    ]
    assert [row.split()[-3:] for row in sampled] == [
        ["True", logprob, "0.500"] for logprob in ("-2.000", "-1.000", "-1.000")
    ]
    untrained = table_of(query.format(1), monkeypatch)[5:]
    assert [row.split()[-3:] for row in untrained] == [["True", "-1.000", "-"]] * 3


@pytest.mark.usefixtures("runs")
def test_a_text_of_white_space_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table_of("select chr(10) as text, 7 as token", monkeypatch)[2].split() == ["\\n", "7"]


@pytest.mark.usefixtures("runs")
def test_without_the_tokenizer_a_token_has_its_id_and_no_text() -> None:
    run = folder_of("hello")
    recipe = {"agent": "hello", "steps": 2, "dataset": {"path": __file__}}
    write_manifest(run, recipe | {"model": {"base": "nobody/has-this-model"}}, "f00d")
    rows = ask("select distinct token, text from tokens where place < 3 order by token", "hello")
    assert rows == [(1, None), (2, None)]


@pytest.mark.usefixtures("runs")
def test_a_row_of_many_columns_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _, *cells = table_of("select * from spans limit 2", monkeypatch)
    assert head == "row 1"
    assert re.fullmatch(r"run +hello", cells[0])


@pytest.mark.usefixtures("runs")
def test_a_table_shows_nothing_that_a_terminal_obeys_and_the_beginning_of_what_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = "select chr(27) || '[2J' as escape, range(1000) as many, repeat('x', 10000) as long"
    shown = "\n".join(table_of(query, monkeypatch))
    assert "\x1b" not in shown
    assert "1000 in all]" in shown.replace("\n", " ").replace("  ", " ")
    assert len(shown) < 3000


@pytest.mark.usefixtures("runs")
def test_rows_beyond_those_shown_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table_of("select * from range(130)", monkeypatch)[-1] == (
        "30 more rows; --format csv has all"
    )


@pytest.mark.usefixtures("runs")
def test_a_run_that_is_not_there_is_refused_and_one_of_another_format_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_json(folder_of("old").manifest, {"format": 1, "recipe": {}})
    said = CliRunner().invoke(app, ["sql", "select count(*) as n from steps", "--format", "csv"])
    assert said.stdout == "n\n2\n"
    assert "old was written in format 1" in caplog.text
    said = CliRunner().invoke(app, ["sql", "from steps", "--run", "nowhere"])
    assert "there is no run at" in str(said.exception)
