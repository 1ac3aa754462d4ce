"""What a run is doing, as its own process or any other reads it from the run's files."""

import gc
import os
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from ratchet.adapters.player_protocol import Failure, Outcome
from ratchet.adapters.rewards import Reward
from ratchet.flows.cli.progress_bar import show_progress, watch_folder
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.journal import Journal, seal
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.reports.progress import (
    Progress,
    ProgressReader,
    describe_run,
    describe_seconds_left,
    draw_line,
)
from ratchet.tasks.storage.files import write_json, write_rows
from ratchet.tasks.storage.logs import append_row
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import write_table
from tests.support.runs.small_recipe import small_recipe
from tests.tasks.test_journal import append_now, ended

NOW = datetime.now(UTC)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Make a run of two steps whose first shard has two examples in two batches, four each."""
    recipe = small_recipe(steps=2, rollouts={"groups": 2, "group_size": 4, "batches": 2})
    run = RunFolder(tmp_path / "hello-1")
    write_manifest(run, recipe.model_dump(mode="json"), "f00d")
    rows = [{"example_id": at, "example": {}, "batch": at, "round": 0} for at in range(2)]
    for shard in ("train-00000", "test-00000"):
        write_rows(run.shard(shard), rows)
    return run


@pytest.fixture
def journal(run: RunFolder) -> Iterator[Journal]:
    with Journal(run.journal("train-00000.0")) as journal:
        yield journal


ONE = Reward(1.0)


def rollout(number: int, outcome: Outcome = ONE, shard: str = "train-00000") -> Span:
    return ended(f"{shard}-0000-{number:02d}", outcome, now=NOW)


def call(number: int, kind: str, tokens: int = 0) -> Span:
    asked = {"rollout_id": rollout(number)["rollout_id"], "attempt": 0, "role": "policy", "call": 0}
    span = {**asked, "kind": kind, "span_id": f"{number}.{kind}", "started": NOW}
    lists = {name: [1] * tokens for name in ("response_token_ids", "logprobs")}
    answer = {"prompt_token_ids": [1], "kept_tokens": 0, **lists, "ended": datetime.now(UTC)}
    return span | {**answer, "gen_ai_usage_output_tokens": tokens} if kind == "llm" else span


def test_rollouts_that_have_ended_and_calls_without_an_answer_are_counted_as_they_come(
    run: RunFolder, journal: Journal
) -> None:
    reader = ProgressReader(run)
    for number in (0, 1):
        append_now(journal, call(number, "begun"))
    assert (reader.look().doing, reader.look().in_flight) == ("step 1 of 2: 0 of 8 rollouts", 2)
    append_now(journal, call(0, "llm", tokens=60))
    append_now(journal, rollout(0))
    now = reader.look()
    assert (now.doing, now.in_flight) == ("step 1 of 2: 1 of 8 rollouts", 1)
    assert now.tokens_per_second == 2, "60 tokens in the last 30 s"


def test_tokens_of_a_batch_that_was_sealed_between_two_looks_are_counted(
    run: RunFolder, journal: Journal
) -> None:
    append_now(journal, call(0, "llm", tokens=60))
    append_now(journal, rollout(0))
    journal.close()
    seal(journal.path, run.spans("train-00000.0"))
    with Journal(run.journal("train-00000.1")) as second:
        append_now(second, call(1, "begun"))
        reader = ProgressReader(run)
        assert [reader.look().tokens_per_second for _ in range(2)] == [2, 2]
        append_now(second, call(1, "llm", tokens=30))
        assert reader.look().tokens_per_second == 3
        second.close()
        seal(second.path, run.spans("train-00000.1"))
        with Journal(run.journal("test-00000.0")):
            assert reader.look().tokens_per_second == 3


def test_tokens_a_second_are_those_since_the_run_was_opened(
    run: RunFolder, journal: Journal
) -> None:
    append_now(journal, call(0, "llm", tokens=60))
    opened = datetime.now(UTC) - timedelta(seconds=10)
    append_row(run.owners, {"opened": f"{opened:%Y-%m-%d %H:%M:%S} UTC"})
    assert ProgressReader(run).look().tokens_per_second == pytest.approx(6, rel=0.2)


def test_an_error_is_the_last_failure_without_what_a_terminal_would_obey(
    run: RunFolder, journal: Journal
) -> None:
    append_now(journal, rollout(0, Failure("KeyError", "'\x1b[2Jcity'\nTraceback")))
    progress = ProgressReader(run).look()
    assert progress.doing == "step 1 of 2: 1 of 8 rollouts"
    shown = describe_run(run, progress, is_open=True).splitlines()
    assert shown[-1] == r"last failure: KeyError: '\x1b[2Jcity'"


def test_how_fast_a_run_is_and_how_long_it_lasts_are_said_only_while_it_is_open(
    run: RunFolder,
) -> None:
    trains = Progress(
        1, 2, "step 2 of 2", in_flight=1, tokens_per_second=1200, seconds_left=(180, 300)
    )
    assert describe_run(run, trains, is_open=True).splitlines() == [
        "hello-1: 1 call in flight",
        "step 2 of 2",
        "1,200 tokens/s, 3 to 5 min left",
    ]
    stopped = describe_run(run, trains, is_open=False)
    assert stopped == f"hello-1: {read_facts(run).state(is_open=False)}\nstep 2 of 2"


def test_a_failure_of_a_step_that_ended_before_the_first_look_is_known(
    run: RunFolder, journal: Journal
) -> None:
    append_now(journal, rollout(0, Failure("KeyError", "'city'\nTraceback")))
    journal.close()
    seal(journal.path, run.spans("train-00000.0"))
    assert ProgressReader(run).look().failure == "KeyError: 'city'", "it has stopped the run"
    record_metrics(run.metrics, 0, {"rollouts/failed": 1})
    assert ProgressReader(run).look().failure == "KeyError: 'city'"


def test_a_batch_that_is_played_anew_is_counted_anew(run: RunFolder, journal: Journal) -> None:
    reader = ProgressReader(run)
    for number in (0, 1):
        append_now(journal, rollout(number))
    assert reader.look().doing.endswith("2 of 8 rollouts")
    journal.close()
    run.set_aside("train-00000.0")
    assert reader.look().doing == "step 1 of 2"
    with Journal(run.journal("train-00000.0")) as again:
        append_now(again, rollout(0))
        assert reader.look().doing.endswith("1 of 8 rollouts")


def test_held_out_rollouts_are_told_from_those_that_are_trained(
    run: RunFolder, journal: Journal
) -> None:
    with Journal(run.journal("test-00000.1")) as evaluation:
        append_now(evaluation, rollout(0, shard="test-00000"))
        said = ProgressReader(run).look().doing
    assert said == "step 1 of 2: 0 of 8 rollouts, scoring the base model: 1 of 2 rollouts"


def test_a_run_that_is_done_is_finished_and_watched_no_longer(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(2):
        record_metrics(run.metrics, step, {"reward/mean": 0.5 * step})
    watch_folder(run)
    state, doing, curve = capsys.readouterr().out.splitlines()
    assert state == "hello-1: finished"
    assert doing.startswith("done, reward 0.50")
    assert curve == "reward by step ▁█ 0.00 → 0.50"


def test_sides_that_the_reference_has_scored_are_counted(run: RunFolder) -> None:
    for path, rows in {
        run.pairs: 9,
        run.reference_parts / "0-4.parquet": 4,
        run.reference_parts / "4-8.parquet": 4,
    }.items():
        write_table(pa.table({"part": [0] * rows}), path)
    assert ProgressReader(run).look().doing == "the reference has scored 8 of 9 sides"


def test_the_time_left_is_that_of_the_steps_before(run: RunFolder) -> None:
    record_metrics(run.metrics, 0, {"reward/mean": 0.5})
    update = run.update("policy", 0)
    update.parent.mkdir()
    update.touch()
    begun = run.shard("train-00000").stat().st_mtime
    os.utime(update, (begun + 90, begun + 90))
    assert ProgressReader(run).look().seconds_left == pytest.approx((90, 90))
    again = datetime.fromtimestamp(begun + 60, UTC)
    append_row(run.owners, {"opened": f"{again:%Y-%m-%d %H:%M:%S} UTC"})
    left = ProgressReader(run).look().seconds_left
    assert left == pytest.approx((30, 30), abs=1), "it was closed for the rest"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ((3, 3.2), "3 s left"),
        ((40, 55), "40 to 55 s left"),
        ((20, 200), "1 to 3 min left"),
        ((100, 200), "2 to 3 min left"),
        ((7200, 10800), "2 to 3 h left"),
    ],
)
def test_the_time_left_is_said_in_the_unit_that_fits_it(
    left: tuple[float, float], said: str
) -> None:
    assert describe_seconds_left(left) == said


def test_a_curve_rises_from_its_lowest_bar_to_its_highest() -> None:
    assert draw_line([0, 1, 2, 7]) == "▁▂▃█"
    assert draw_line([0.5, 0.5]) == "▁▁"
    assert len(draw_line(range(1000))) == 40


def test_a_file_of_errors_gets_a_line_a_step(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress({run: 2}):
        metrics = {"reward/mean": 0.84, "calls": 4, "tokens/sampled": 28}
        record_metrics(run.metrics, 0, metrics)
    assert capsys.readouterr().err == "step 1 of 2: reward 0.84, 7.0 tokens an answer\n"


def test_a_held_out_reward_is_shown_with_the_checkpoint_that_has_it(run: RunFolder) -> None:
    scored = score_outcomes([ScoredRollout("a", 0.25), ScoredRollout("b", 0.25)])
    write_json(run.evaluation("00000"), {"sampled": scored.model_dump(mode="json")})
    record_metrics(run.metrics, 1, {"reward/mean": 0.84})
    assert read_facts(run).held_out.last == "held-out reward 0.25 before training"
    assert "held-out reward 0.25 before training" in str(ProgressReader(run).look())


def test_the_line_of_a_step_has_the_held_out_reward_that_came_with_it(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = score_outcomes([ScoredRollout("a", 0.25), ScoredRollout("b", 0.25)])
    write_json(run.evaluation("00000"), {"sampled": scored.model_dump(mode="json")})
    with show_progress({run: 2}):
        for step in range(2):
            record_metrics(run.metrics, step, {"reward/mean": 0.84})
    assert capsys.readouterr().err.splitlines() == [
        "step 1 of 2: reward 0.84, held-out reward 0.25 before training",
        "step 2 of 2: reward 0.84",
    ]


def test_of_all_facts_of_a_run_only_the_newest_are_kept(run: RunFolder) -> None:
    record_metrics(run.metrics, 0, {"reward/mean": 0.5})
    before = weakref.ref(read_facts(run))
    record_metrics(run.metrics, 1, {"reward/mean": 0.75})
    assert read_facts(run).done == 2
    gc.collect()
    assert before() is None
