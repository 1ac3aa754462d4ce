"""A run is bound to its data and code: a change is refused, or recorded with its step."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ratchet.adapters.project import modules
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.cli.commands import app
from ratchet.flows.opening.checks import accept_changes, check_start
from ratchet.flows.opening.eval_targets import EvalTarget
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.reports.facts import describe_origin
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.manifest import (
    bind_run,
    checksum,
    file_rows,
    list_changes,
    read_manifest,
    write_manifest,
)
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from tests.support.runs.finished import write_finished
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import HELLO, small_recipe

PLAYS = "async def play(example, *, place=None, **_):\n    return 1.0\n"
FILES = {
    "rows.jsonl": '{"identity": "a fox", "folder": "given", "tests": "hidden", "split": "train"}\n'
    '{"identity": "an owl", "tests": "diff --git a/x b/x", "split": "test"}\n',
    "agents/mine.py": PLAYS,
    "agents/judging.py": "async def play(example, **_):\n    return {}\n",
    "agents/imported.py": "from helping import played as play\n",
    "agents/helping.py": PLAYS.replace("play(", "played("),
    "agents/asking.py": "async def play(example, *, roles, **_):\n    return 1.0\n",
    "agents/prog.py": "print(1)",
    "answering.py": "def say(messages, example):\n    return 'yes'\n",
    "base/home/notes/a.txt": "a",
    "given/b.txt": "b",
    "hidden/check.sh": "test -e answer",
    "scores/score.py": "print(0)",
}
ASKING = {"agent": "asking", "roles": {"helper": "function:answering:say"}}
PLACE = {"template": "base", "reward": "python ${PROJECT}/scores/score.py tests/check.sh"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_tinker: None) -> Path:
    for name, text in FILES.items():
        write_text(tmp_path / name, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(modules, "_read", {})
    return tmp_path


def recipe(**changes: Any) -> Recipe:
    values = {"agent": "mine", "dataset": {"path": "rows.jsonl", "columns": ["identity"]}}
    return small_recipe(**values | changes)


def begun(made: Recipe, name: str = "bound") -> RunFolder:
    """Bind a run as a flow does, and do one of its steps."""
    run, values = folder_of(name), made.model_dump(mode="json")
    write_manifest(run, values, made.fingerprint(), {"files": made.checksums(run)})
    record_metrics(run.metrics, 0, {})
    return run


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        ("rows.jsonl", {}),
        ("agents/mine.py", {}),
        ("agents/mine.py:mine:play", {"agent": "mine:play"}),
        ("agents/helping.py:imported:play", {"agent": "imported:play"}),
        ("agents/prog.py", {"agent": "command:sh -c 'python agents/prog.py'"}),
        ("agents/judging.py", {"judge": {"agent": "judging", "role": "policy"}}),
        ("answering.py:answering:say", ASKING),
        ("base/home/notes/a.txt:base", {"place": PLACE}),
        ("given/b.txt:given", {"place": PLACE}),
        ("hidden/check.sh:hidden", {"place": PLACE}),
        ("scores/score.py:${PROJECT}/scores/score.py", {"place": PLACE}),
    ],
)
def test_a_run_goes_on_with_a_changed_file_only_if_that_is_said(
    project: Path, monkeypatch: pytest.MonkeyPatch, edited: str, changes: dict[str, Any]
) -> None:
    file, _, name = edited.partition(":")
    made = recipe(**changes)
    run = begun(made)
    check_start(made, run)
    (project / file).write_text(FILES[file] + "\n\n")
    monkeypatch.setattr(modules, "_read", {})  # as another process
    with pytest.raises(RunError) as refused:
        check_start(made, run)
    assert str(refused.value) == (
        f"the run runs/bound was made with other contents of {name or file}; put them back, or "
        "give `ratchet resume bound --changed` to go on with what is there now"
    )
    check_start(made, run, trains=False)  # as an evaluation does
    check_start(made, folder_of("new"))
    accept_changes(run)
    check_start(made, run)
    assert list_changes(run) == [f"other contents of {name or file} after step 1"]
    assert describe_origin(run) == f"other contents of {name or file} after step 1"


def test_a_file_that_nothing_of_the_run_reads_may_change(project: Path) -> None:
    run = begun(made := recipe(agent="command:python agents/prog.py"))
    assert {*made.checksums(run)} == {"rows.jsonl", "agents/prog.py"}
    for file in ("agents/mine.py", "agents/helping.py", "hidden/check.sh", "given/b.txt"):
        (project / file).write_text("other")
    check_start(made, run)


def test_a_flow_that_is_run_again_refuses_a_changed_file(
    project: Path, prefect_server: None
) -> None:
    run = begun(made := recipe())
    (project / "rows.jsonl").write_text(FILES["rows.jsonl"] * 2)
    with pytest.raises(RunError, match=r"other contents of rows\.jsonl; put them back, or give"):
        train(made, run="bound")
    assert not (run.path / "shards").exists()


def test_a_run_of_an_earlier_version_goes_on_and_is_bound_from_then_on(project: Path) -> None:
    made, run = recipe(), folder_of("old")
    write_manifest(run, made.model_dump(mode="json"), made.fingerprint())
    check_start(made, run)
    accept_changes(run)
    assert [row["step"] for row in file_rows(run)] == [0, 0]
    assert list_changes(run) == []
    (project / "rows.jsonl").write_text(FILES["rows.jsonl"] * 2)
    with pytest.raises(RunError, match="other contents of rows"):
        check_start(made, run)


def test_a_run_that_has_all_its_steps_or_is_open_records_no_change(project: Path) -> None:
    made = recipe(steps=1, checkpoints={"every": 1})
    whole = begun(made, "whole")
    (project / "rows.jsonl").write_text(FILES["rows.jsonl"] * 2)
    accept_changes(whole)
    assert list_changes(whole) == []
    run = begun(recipe())
    with (
        bind_run("bound", made.model_dump(mode="json"), ""),
        pytest.raises(RunError, match="is open in process"),
    ):
        accept_changes(run)


def test_an_evaluation_with_a_changed_file_is_one_of_its_own(project: Path) -> None:
    write_finished("done", made := recipe())
    run = folder_of("done")
    write_manifest(
        run, made.model_dump(mode="json"), made.fingerprint(), {"files": made.checksums(run)}
    )
    assert EvalTarget.find(made, "done", None, None).tag == ""
    (project / "rows.jsonl").write_text(FILES["rows.jsonl"] * 2)
    after, again = (EvalTarget.find(made, "done", None, None) for _ in range(2))
    assert after.tag == again.tag != ""


def test_texts_that_a_run_has_bound_are_read_no_more(project: Path, tmp_path: Path) -> None:
    values = {"dataset": {"path": "rows.jsonl"}, "steps": 2, "optimizer": {"learning_rate": 1.0}}
    made, run = FinetuneRecipe.model_validate(values), RunFolder(tmp_path / "texts")
    assert {*made.checksums(run)} == {"rows.jsonl"}
    write_text(run.texts, "tokens")
    assert made.checksums(run) == {}


NAMES = st.sampled_from(["a", "b", "c/d", ".e"])


@given(st.dictionaries(NAMES, st.binary(max_size=3)), st.dictionaries(NAMES, st.binary(max_size=3)))
def test_folders_have_one_checksum_only_if_they_hold_the_same(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes], other: dict[str, bytes]
) -> None:
    sums = list[str]()
    for files in (one, other):
        folder = tmp_path_factory.mktemp("folder")
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        sums.append(checksum([folder]))
    assert (sums[0] == sums[1]) == (one == other)


def test_a_checksum_is_of_what_a_file_holds_now(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one")
    first = checksum([file])
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert checksum([file]) != first


@pytest.mark.story
def test_a_fork_and_a_resumed_run_say_since_when_they_have_other_data(
    root: Path, recorded_run: RecordedRun, tmp_path: Path
) -> None:
    """Train on from step 1 of a run with a data set that is changed twice."""
    parent = recorded_run(small_recipe(steps=3, checkpoints={"every": 2}), "parent")
    rows = HELLO.read_text().splitlines(keepends=True)
    data = tmp_path / "rows.csv"
    data.write_text("".join(rows))
    made = small_recipe(
        steps=3, checkpoints={"every": 2}, dataset={"path": str(data), "columns": ["identity"]}
    )
    fork = fork_run(parent, "other", 1, made.model_dump(mode="json"), made.fingerprint())
    assert list_changes(fork) == []
    assert {str(data), str(HELLO), "agents/hello.py"} == {
        name for row in file_rows(fork) for name in row["files"]
    }
    data.write_text("identity,split\n" + "a new otter,train\na new fox,train\na new cat,test\n" * 4)
    run = CliRunner()
    refused = run.invoke(app, ["resume", "other"])
    assert "other contents of" in str(refused.exception)
    resumed = run.invoke(app, ["resume", "other", "--changed"], catch_exceptions=False)
    said = f"other contents of {data} after step 1"
    assert " ".join(resumed.stdout.split()).count(said.replace("\n", " ")) == 1
    played = [row["example"]["identity"] for row in read_shard(fork.shard("train-00001"))]
    assert {*played} <= {"a new otter", "a new fox"}
    assert said in fork.report.read_text()
    again = fork_run(fork, "again", 2, made.model_dump(mode="json"), made.fingerprint())
    assert list_changes(again) == [said]


def test_a_run_names_the_commit_of_its_folder_and_whether_files_differ_from_it(
    project: Path,
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@e")
        return subprocess.run(
            ["git", *who, *words], check=True, capture_output=True, text=True
        ).stdout

    made = recipe()
    assert "commit" not in read_manifest(begun(made, "before"))
    git("init")
    git("add", ".")
    git("commit", "--message", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert read_manifest(begun(made, "clean"))["commit"] == commit
    (project / "rows.jsonl").write_text("")
    assert read_manifest(begun(made, "edited"))["commit"] == f"{commit} and changes"
