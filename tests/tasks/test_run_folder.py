"""A run's folder knows where each file lies, and belongs to one process at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.tasks.storage.files import write_rows
from ratchet.tasks.storage.names import batch_name, shard_name
from ratchet.tasks.storage.run_folder import (
    LONGEST_RUN_NAME,
    RunError,
    RunFolder,
    folder_of,
    name_run,
)

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def run(runs: Path) -> RunFolder:
    (runs / "one").mkdir()
    return folder_of("one")


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_second_process_is_refused_with_the_first_ones_name(run: RunFolder) -> None:
    program = (
        "from ratchet.tasks.storage.run_folder import folder_of\n"
        "with folder_of('one').locked(): print('open', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        assert run.is_open()
        with pytest.raises(RunError, match=f"process {first.pid} on "), run.locked():
            pass
        first.kill()
    assert not run.is_open()
    with run.locked():
        pass  # a lock whose owner was killed is not in the way


def test_any_agent_can_name_a_run() -> None:
    name = name_run("command:python agents/x.py --fast", "1f")
    assert name == "command-python-agents-x.py-fast-1f"
    assert folder_of(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "7",
        "_x",
        "Big-one_2.1",
        "a.b",
        "a" * LONGEST_RUN_NAME,
        "dryruns/hello-1",
        "evaluations/x",
    ],
)
def test_a_run_is_named_by_letters_digits_and_three_signs(runs: Path, name: str) -> None:
    assert folder_of(name).path == runs / name


ODD = {
    "signs": "a b, a;b, a'b, a\"b, a<b, a>b, a|b, a&b, a$b, a`b, a(b), a*, a?, a!, a#, a~, a=b",
    "paths": "/a, a/, a/b, ../a, runs/../../a, a\\b, dryruns/.., dryruns/, dryruns/a/b, .., .a, -x",
    "places": "evaluations, dryruns, dryruns/evaluations, a@1, a:b",
    "unicode": "é, Ünïcode, ｆｕｌｌ, 名前, ٣, a\u0301, a\u200b, \U0001f600, \udcff",
    "control": "a\n, a\tb, a\0b, a\x1b[31m, a\r",
}


@pytest.mark.parametrize(
    "name", ["", ",", " a", "a ", *(name for names in ODD.values() for name in names.split(", "))]
)
def test_whatever_a_shell_or_a_page_reads_otherwise_names_no_run(name: str) -> None:
    with pytest.raises(RunError, match=r"cannot name a run: use letters of A to Z, digits, '_'"):
        folder_of(name)


def test_a_name_that_a_file_system_refuses_names_no_run() -> None:
    with pytest.raises(RunError, match="use at most 200 letters"):
        folder_of("a" * (LONGEST_RUN_NAME + 1))
    assert folder_of(name_run("command:" + "x" * 300, "1f")).name.endswith("x-1f")


def test_the_batches_of_a_shard_are_listed_by_their_numbers(run: RunFolder) -> None:
    batches = [batch_name(shard_name("train", 3), number) for number in range(12)]
    others = [batch_name(shard_name("train", 4), 0), batch_name(shard_name("test", 3), 0)]
    touch(*map(run.spans, [*batches, *others]), *map(run.journal, batches[::-1]))
    assert run.sealed("train-00003") == [run.spans(batch) for batch in batches]
    assert run.journalled("train-00003") == batches


def test_an_evaluation_by_other_settings_has_batches_of_its_own(run: RunFolder) -> None:
    own, tagged = shard_name("test", 2), shard_name("test.4f2a91", 2)
    touch(run.spans(batch_name(own, 0)), run.spans(batch_name(tagged, 0)))
    assert run.sealed(own) == [run.spans("test-00002.0")]
    assert run.sealed(tagged) == [run.spans("test.4f2a91-00002.0")]


def test_a_journal_whose_batch_is_sealed_is_not_read_beside_it(run: RunFolder) -> None:
    touch(run.spans("train-00000.0"), *map(run.journal, ["train-00000.0", "train-00000.1"]))
    assert run.all_spans() == ([run.spans("train-00000.0")], [run.journal("train-00000.1")])


def test_the_files_of_a_batch_are_its_shard_its_journal_and_its_spans(run: RunFolder) -> None:
    batch, other = "train-00001.0", "train-00001.1"
    files = [run.shard("train-00001"), run.journal(batch), run.spans(batch)]
    touch(*files, run.shard("train-00002"), run.spans(other), run.journal(other))
    assert run.batch_files([batch, batch]) == files


def test_the_held_out_batches_of_a_step_are_those_that_are_sealed(run: RunFolder) -> None:
    sealed = ["greedy-00002.0", "test-00002.0", "test.4f2a91-00002.1"]
    others = ["train-00002.0", "test-00001.0", "test-00012.0"]
    touch(*map(run.spans, [*sealed, *others]), run.journal("test-00002.1"))
    assert sorted(run.held_out(2)) == sealed


def test_each_policy_has_files_of_its_own(run: RunFolder) -> None:
    datums = {name: run.datums(name, 2) for name in ("policy", "fox")}
    assert datums["policy"] == run.path / "datums" / "00002.parquet"
    assert datums["fox"] == run.path / "policies" / "fox" / "datums" / "00002.parquet"
    touch(*datums.values(), run.update("fox", 2), run.update("fox", 3))
    assert run.policies() == ["policy", "fox"]
    assert set(run.learning_files(2)) == {*datums.values(), run.update("fox", 2)}


def test_a_deleted_run_leaves_nothing(runs: Path, run: RunFolder) -> None:
    touch(run.datums("policy", 0))
    with run.locked(), pytest.raises(RunError, match="is open in process"):
        run.delete()
    run.delete()
    assert list(runs.iterdir()) == []


def test_the_shard_names_its_batches(run: RunFolder) -> None:
    shard = shard_name("train", 3)
    write_rows(run.shard(shard), [{"batch": number} for number in (0, 2, 1, 0)])
    batches = [batch_name(shard, number) for number in range(3)]
    touch(*map(run.journal, [*batches[1:], batch_name(shard, 7)]))
    assert run.journalled(shard) == batches[1:]
    run.shard(shard).write_text("damaged")
    assert run.journalled(shard) == [*batches[1:], batch_name(shard, 7)], "the folder is listed"
