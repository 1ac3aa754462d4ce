"""The table of `ratchet runs`: what each run has become, on a line that fits the terminal."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.adapters.process.terminal import hanging
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.training import _closing_lines
from ratchet.flows.opening.flow_runs import summarize_run
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.reports.board.runs import list_runs, read_row, runs_table
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.reports.plots import draw_named_rewards
from ratchet.tasks.reports.tables import list_evaluations
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.manifest import bind_run, write_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of, runs_root
from tests.tasks.test_reports import LONG, ended, rollout, sealed

FINGERPRINT = "f00d"
RECIPE = {
    "flow": "train",
    "agent": "hello",
    "dataset": {"path": __file__},
    "model": {"base": "local/tiny-chat"},
    "optimizer": {"learning_rate": 0.1},
}
READS = """
import sys
from ratchet.flows.cli.main import main
try:
    main()
finally:
    print({"prefect", "openai", "torch", "tinker", "transformers"} & {*sys.modules})
"""


pytestmark = pytest.mark.usefixtures("runs")


def make_run(
    name: str, steps: int, done: int, parent: dict[str, object] | None = None
) -> RunFolder:
    run = folder_of(name)
    write_manifest(run, RECIPE | {"steps": steps}, FINGERPRINT, {"parent": parent})
    for step in range(done):
        spent = {"tokens/sampled": 750, "seconds/sampling": 25.0, "seconds/training": 5.0}
        rewards = {"reward/mean": step / 4, "reward/policy/mean": step / 4}
        record_metrics(run.metrics, step, rewards | spent)
    return run


def evaluate(run: RunFolder, step: int, *rewards: float | None, **own: float) -> None:
    measures = {f"measure/{name}": value for name, value in own.items()}
    rollouts = [
        ScoredRollout(str(k), reward, ended=True, measures=measures)
        for k, reward in enumerate(rewards)
    ]
    scored = score_outcomes(rollouts)
    write_json(run.evaluation(f"{step:05d}"), {"sampled": scored.model_dump(mode="json")})


def test_runs_are_listed_with_their_state() -> None:
    make_run("a", steps=2, done=2)
    make_run("b", steps=4, done=2)
    running = make_run("c", steps=4, done=0)
    Ledger(make_run("d", steps=4, done=2).checkpoints(POLICY)).begin(3)
    with running.locked():
        records = [row["record"] for row in list_runs()]
    listed = [(of["run"], of["steps"], of["state"]) for of in records]
    assert listed == [
        ("a", 2, "finished"),
        ("b", 4, "stopped"),
        ("c", 4, "running"),
        ("d", 4, "stopped, update 2 in doubt"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["runs"], "a hello 2/2"), (["report", "a"], "report.html"), (["keys"], "flow")],
)
def test_a_command_that_reads_loads_neither_prefect_nor_a_client_nor_torch(
    words: list[str], said: str
) -> None:
    evaluate(make_run("a", steps=2, done=2), 2, 1.0)
    command = [sys.executable, "-c", READS, *words]
    read = subprocess.run(command, capture_output=True, text=True)
    assert said in " ".join(read.stdout.split()), read.stderr
    assert read.stdout.splitlines()[-1] == "set()"


def test_of_a_run_are_read_the_files_that_its_line_shows_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run("a", steps=3, done=3)
    for step in range(4):
        evaluate(run, step, 0.5)
        write_json(run.update(POLICY, step), {"step": step})
    opened, plain = [], Path.open

    def open_file(path: Path, *arguments: Any, **named: Any) -> IO[Any]:
        opened.append(path)
        return plain(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", open_file)
    runs_table(100)
    read = sorted(path for path in opened if run.path in path.parents)
    assert read == sorted([run.manifest, run.metrics, *run.evaluations()])


def test_a_line_has_the_gain_the_parent_and_the_cost() -> None:
    assert "holds no runs yet" in runs_table(100)
    parent = make_run("hello-1", steps=4, done=2)
    evaluate(parent, 0, 0.0, 0.0, 0.5, 0.5)
    evaluate(parent, 1, 1.0, 0.0)
    evaluate(parent, 2, 1.0, 0.5)
    make_run("hello-1-lr", 4, 0, {"run": "hello-1", "step": 2, "how": "fork"})
    assert runs_table(100).splitlines() == [
        "run         agent  steps  held-out     parent     state    tokens  min",
        "hello-1     hello  2/4    0.25 → 0.75  -          stopped  1.5k    1.0",
        "hello-1-lr  hello  0/4    -            hello-1@2  stopped  -       -",
    ]


def test_dollars_have_a_column_if_a_price_is_known_and_minutes_none_if_steps_overlap() -> None:
    run = make_run("priced", steps=4, done=1)
    record_metrics(run.metrics, 1, {"cost/judge": 0.25, "cost/search": 0.5})
    write_manifest(folder_of("lagging"), RECIPE | {"steps": 1, "rollouts": {"lag": 1}}, "beef")
    record_metrics(folder_of("lagging").metrics, 0, {"seconds/sampling": 60.0})
    names, lagging, priced = (line.split() for line in runs_table(100).splitlines())
    assert dict(zip(names, priced, strict=True))["USD"] == "0.75"
    assert dict(zip(names, lagging, strict=True))["min"] == "-"


def test_runs_are_listed_for_programs(runs: Path) -> None:
    evaluate(make_run("a", steps=4, done=2), 2, 1.0, 0.0)
    (runs / "b").mkdir()
    (runs / "b" / "manifest.json").write_text("{}")
    one, other = json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)
    assert one == {
        "run": "a",
        "state": "stopped",
        "trouble": "",
        "agent": "hello",
        "done": 2,
        "steps": 4,
        "measure": "reward",
        "held_out": {"2": 0.5},
        "measures": {},
        "parent": None,
        "tokens": 1500,
        "seconds": 60.0,
        "usd": None,
    }
    assert (other["run"], other["state"]) == ("b", "unreadable")
    assert other["trouble"]


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_fits_and_shortens_long_names_in_the_middle(width: int) -> None:
    name = "guess_the_number-with-a-rather-long-name-20261125-005201"
    run = make_run(name, steps=4000, done=2, parent={"run": name, "step": 2000, "how": "fork"})
    evaluate(run, 0, 0.0)
    evaluate(run, 2, 1.0)
    record_metrics(run.metrics, 2, {"cost/judge": 1234.5})
    Ledger(run.checkpoints(POLICY)).begin(3)
    head, line = runs_table(width).splitlines()
    assert len(line) <= width
    assert len(head) <= width
    shown, *_ = line.split()
    before, _, after = shown.partition("…")
    assert min(len(before), len(after)) >= 3
    assert name.startswith(before)
    assert name.endswith(after)
    assert "0.00 → 1.00" in line
    assert "1234.50" in line


def test_a_run_that_is_served_says_so_until_it_is_not() -> None:
    make_run("done", steps=2, done=2)
    recipe = RECIPE | {"steps": 2}
    with bind_run("done", recipe, FINGERPRINT, to_serve=True):
        assert states() == ["finished, served"]
        assert folder_of("done").is_held()
        with pytest.raises(RunError, match=r"is open in process .*, which serves it; wait for it"):
            folder_of("done").delete()
    assert states() == ["finished"]
    with bind_run("done", recipe, FINGERPRINT):
        assert states() == ["running"]


def states() -> list[str]:
    return [row["record"]["state"] for row in list_runs()]


def test_a_finished_run_is_read_anew_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = make_run("a", steps=1, done=1), make_run("b", steps=2, done=1)
    first, read = runs_table(100), list[str]()
    monkeypatch.setattr(
        "ratchet.tasks.reports.board.runs.read_row",
        lambda facts, is_open: read.append(facts.name) or read_row(facts, is_open),
    )
    assert (runs_table(100), read) == (first, ["b"])
    evaluate(run, 1, 0.5)
    record_metrics(other.metrics, 1, {})
    assert "0.50" in runs_table(100)
    assert read == ["b", "a", "b"]
    kept = runs_root() / ".finished.jsonl"
    for contents in ("", "{}\n", kept.read_text().replace("finished", "finished late")):
        kept.write_text(contents)
        assert states() == ["finished", "finished"]


def test_below_the_table_is_the_last_error_of_each_run_to_its_last_line() -> None:
    make_run("sound", steps=4, done=1)
    run = make_run("broken", steps=4, done=1)
    rollouts = [rollout(k, ended(None, LONG), step=1) for k in range(5)]
    sealed(run.spans("train-00001.0"), *rollouts)
    run.journal("train-00001.0").parent.mkdir()
    run.journal("train-00001.0").touch()
    record_metrics(run.metrics, 1, {"rollouts/failed": 5})
    listed, _, error = runs_table(100).partition("\n\n")
    assert listed.splitlines()[1].split()[:3] == ["broken", "hello", "2/4"]
    named = "train-00001-0000-00, train-00001-0000-01, train-00001-0000-02 and 2 more"
    said = "broken, 5 rollouts failed, the last error in"
    assert error == hanging(f"{said} {named}:\nTimeoutError: {LONG}")
    record_metrics(run.metrics, 2, {"rollouts/failed": 0})
    assert runs_table(100) == listed.replace("2/4", "3/4"), "what was mended is not said again"
    record_metrics(run.metrics, 3, {"rollouts/failed": 1})
    (run.spans("train-00003.0")).write_bytes(b"what is this?")
    run.journal("train-00003.0").touch()
    assert "train-00003.0.parquet is damaged" in runs_table(100)


def test_a_damaged_run_is_a_line_with_its_remedy_beside_the_others() -> None:
    make_run("sound", steps=4, done=1)
    damaged = make_run("damaged", steps=4, done=1)
    damaged.metrics.write_text('{"step": 0, "crc32": "00000000"}\n')
    listed, _, said = runs_table(100).partition("\n\n")
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["damaged", "sound"]
    assert listed.splitlines()[1].split()[-3:].count("damaged") == 1
    assert said.startswith("damaged: line 1 of ")


def test_what_an_agent_measures_itself_is_where_its_rewards_are() -> None:
    run, judged = make_run("a", steps=4, done=2), make_run("b", steps=4, done=2)
    evaluate(run, 0, 0.5, 0.52, right=0.14, words=7.0)
    evaluate(run, 2, 0.8, 0.82, right=0.19, words=9.5)
    evaluate(judged, 0, None, None, right=0.5)
    table = runs_table(160).splitlines()
    assert table[0].split()[:6] == ["run", "agent", "steps", "held-out", "measures", "state"]
    assert "0.51 → 0.81  right 0.14 → 0.19, words 7.00 → 9.50  " in table[1]
    assert "-            right 0.50  " in table[2]
    one, _ = json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)
    assert one["measures"] == {"right": {"0": 0.14, "2": 0.19}, "words": {"0": 7.0, "2": 9.5}}
    said = _closing_lines(summarize_run(run), run, "1 s").splitlines()
    assert "measure right 0.14 → 0.19, words 7.00 → 9.50" in said
    drawn = draw_named_rewards([read_facts(run).curves()])
    titles = [re.search(r"([^>]*), as the agent measures it", one) for one in drawn]
    assert [title and title[1].strip() for title in titles] == ["right", "words"]
    twice = [*run.evaluations(), *run.evaluations()]
    names, rows = list_evaluations(twice, usage=False)
    assert names[-2:] == ["right", "words"]
    assert [row[:3] + row[-2:] for row in rows] == [
        ["0", "sampled", "all", 0.14, 7.0],
        ["2", "sampled", "all", 0.19, 9.5],
    ]


def test_a_run_whose_removal_was_killed_is_listed_no_more() -> None:
    run = make_run("first", 1, 1)
    run.path.replace(run.path.with_name(".first.deleted"))
    make_run("second", 1, 1)
    assert [row["run"] for row in list_runs()] == ["second"]


def test_the_sizes_of_runs_are_shown_when_asked_for() -> None:
    run = make_run("sized", 1, 1)
    before = sum(run.sizes().values())
    (run.engine / "weights").mkdir(parents=True)
    (run.engine / "weights" / "one").write_bytes(bytes(2_000_000))
    assert sum(run.sizes().values()) == before + 2_000_000
    shown = CliRunner().invoke(app, ["runs", "--size"]).output
    assert "bytes" in shown
    assert "2.0M" in shown
    [row] = json.loads(CliRunner().invoke(app, ["runs", "--size", "--json"]).output)
    assert row["bytes"] == sum(run.sizes().values())
    [row] = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)
    assert "bytes" not in row
