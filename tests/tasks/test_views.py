"""A question about a run is asked of its journals and its Parquet files alike."""

from pathlib import Path

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.rewards import Reward
from ratchet.tasks.recording.journal import Journal, seal
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.storage.run_folder import RunFolder
from tests.tasks.test_journal import NOON, append_now, call, ended


def batch(step: int) -> list[Span]:
    """Spans of a rollout that was cut off after a call, and of its next attempt."""
    name = f"train-{step:05d}-0000-00"
    first = call(1) | {"rollout_id": name, "step": step, "shard": name[:11], "recalled": False}
    begun = {key: first[key] for key in ("rollout_id", "step", "shard", "role")}
    begun |= {"attempt": 0, "kind": "begun", "started": NOON}
    return [
        begun | {"call": 1, "span_id": "begun 1"},
        first,
        begun | {"call": 2, "span_id": "begun 2"},
        first | {"attempt": 1, "span_id": "again", "recalled": True},
        ended(name, Reward(0.5), attempt=1),
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Step 0 is sealed, step 1 is still a journal."""
    run = RunFolder(tmp_path / "run")
    for step in (0, 1):
        with Journal(run.journal(f"train-{step:05d}.0")) as journal:
            for span in batch(step):
                append_now(journal, span)
    seal(run.journal("train-00000.0"), run.spans("train-00000.0"))
    return run


def test_a_sealed_batch_and_one_that_is_not_give_the_same_rows(run: RunFolder) -> None:
    query = (
        "select kind, attempt, call, recalled, reward, started = $noon, "
        "prompt_token_ids, messages ->> '$[0].content' from spans where step = $step "
        "order by all"
    )
    with open_views([run], ["spans"]) as connection:
        rows = [
            connection.execute(query, {"step": step, "noon": NOON}).fetchall() for step in (0, 1)
        ]
    assert rows[0] == rows[1]
    assert [row[:4] for row in rows[0]] == [
        ("begun", 0, 2, None),
        ("llm", 0, 1, False),
        ("llm", 1, 1, True),
        ("reward", 1, None, None),
    ], "superseded attempts are there, and of what was begun what was lost"


@pytest.mark.parametrize("folder", ["journal", "spans"])
def test_one_kind_of_file_is_enough(run: RunFolder, folder: str) -> None:
    for path in (run.path / ({"journal", "spans"} - {folder}).pop()).iterdir():
        path.unlink()
    with open_views([run], ["spans"]) as connection:
        rows = connection.execute("select count(*) from spans").fetchall()
    assert rows == [(8 if folder == "journal" else 4,)]


def test_a_run_that_has_just_begun_has_no_spans(tmp_path: Path) -> None:
    with open_views([RunFolder(tmp_path)], ["spans"]) as connection:
        assert connection.execute("select * from spans").fetchall() == []


def test_what_is_torn_off_does_not_count_and_what_is_damaged_is_refused(run: RunFolder) -> None:
    journal = run.journal("train-00001.0")
    data = journal.read_bytes()
    journal.write_bytes(data[:-10])
    with open_views([run], ["spans"]) as connection:
        rows = connection.execute("select count(*) from spans where kind = 'reward'").fetchall()
    assert rows == [(1,)]
    journal.write_bytes(data[:30] + b"x" + data[31:])
    with pytest.raises(UserError, match=r"train-00001\.0\.jsonl, line 1, is damaged"):
        open_views([run], ["spans"])
    sealed = run.spans("train-00000.0")
    journal.write_bytes(data)
    sealed.write_bytes(sealed.read_bytes()[:-9] + b"x" + sealed.read_bytes()[-8:])
    with pytest.raises(UserError, match=r"train-00000\.0\.parquet is damaged"):
        open_views([run], ["spans"])


def test_the_view_of_spans_says_what_was_kept(run: RunFolder) -> None:
    with open_views([run], ["spans"]) as connection:
        columns = connection.sql("from spans").columns
    assert {"kept_tokens", "kept_call", "kept_span_id", "kept_how"} <= {*columns}
