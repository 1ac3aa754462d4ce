import json
import math
import os
import subprocess
import sys
from array import array
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.player_protocol import Failure, Outcome, RolloutEnd
from ratchet.adapters.rewards import Reward
from ratchet.tasks.recording.journal import Journal, JournalError, read_journal, read_spans, seal
from ratchet.tasks.recording.records import ShortCalls, WholeCalls
from ratchet.tasks.recording.spans import Span, end_spans

ROOT = Path(__file__).parents[2]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def call(number: int, rollout: int = 0) -> Span:
    tokens = array("i", range(number + 1))
    return {
        "rollout_id": f"train-00000-0000-{rollout:02d}",
        "attempt": 0,
        "role": "policy",
        "call": number,
        "span_id": f"{rollout}.{number}",
        "kind": "llm",
        "started": NOON,
        "messages": [{"role": "user", "content": "é\n\u2028"}],
        "prompt_token_ids": tokens,
        "response_token_ids": tokens,
        "logprobs": array("d", [-0.1] * len(tokens)),
        "kept_tokens": number,
    }


def ended(rollout: str, outcome: Outcome, attempt: int = 0, now: datetime = NOON) -> Span:
    """Return the last span of the end of a rollout attempt."""
    return end_spans(RolloutEnd(outcome, 0.0, rollout, attempt), now)[-1]


def append_now(journal: Journal, span: Span) -> None:
    """Append a span, and wait until it is on disk."""
    journal.append(span).result()


def written(path: Path, *spans: Span) -> Path:
    with Journal(path) as journal:
        for span in spans:
            append_now(journal, span)
    return path


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    spans = [call(0), call(1), ended("train-00000-0000-00", Reward(0.1))]
    assert read_journal(written(tmp_path / "new" / "j.jsonl", *spans)) == spans


def test_what_json_can_say_and_few_writers_can_is_read_back(tmp_path: Path) -> None:
    span = {**call(0), "attributes": {"seed": 10**30, "text": "half a pair: \ud800", "é": -0.0}}
    assert read_journal(written(tmp_path / "j.jsonl", span)) == [span]


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63), -(2**63) - 1])
def test_an_integer_of_any_length_is_read_back(tmp_path: Path, number: int) -> None:
    span = {**call(0), "attributes": {"seed": number}}
    assert as_json(read_journal(written(tmp_path / "j.jsonl", span))) == as_json([span])


def test_a_span_is_in_the_file_when_its_append_is_done(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl") as journal:
        for number, written in enumerate([journal.append(call(one)) for one in range(20)]):
            written.result()
            assert any(span["call"] == number for span in read_journal(journal.path))
    assert len(read_journal(journal.path)) == 20


def test_appends_that_wait_together_are_synced_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (syncs.append(file), sync(file)))

    with Journal(tmp_path / "j.jsonl") as journal:
        syncs.clear()
        for written in [journal.append(call(0, rollout)) for rollout in range(100)]:
            written.result()
    assert len(syncs) < 50


@pytest.mark.parametrize("kept", [1, 10, -1])
def test_a_torn_last_line_never_counted(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "j.jsonl", call(0), call(1))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    assert read_journal(path) == [call(0)]
    written(path, call(1), call(2))
    assert read_journal(path) == [call(0), call(1), call(2)]


def test_a_span_is_recorded_once(tmp_path: Path) -> None:
    path = written(tmp_path / "j.jsonl", call(0))
    with Journal(path) as journal:
        with pytest.raises(ValueError, match="already has the span"):
            append_now(journal, call(0))
        append_now(journal, call(1))
    assert len(read_journal(path)) == 2


def test_a_span_that_breaks_an_invariant_is_not_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl") as journal, pytest.raises(ValueError, match="prompt of 1"):
        append_now(journal, call(0) | {"kept_tokens": 2})
    assert read_journal(journal.path) == []


def test_a_journal_is_one_writer_s_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path), pytest.raises(JournalError, match="being written by another"):
        Journal(path)
    written(path, call(0))


def test_after_a_failed_write_nothing_more_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with Journal(tmp_path / "j.jsonl") as journal:
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(JournalError, match="Input/output error"):
            append_now(journal, call(0))
        monkeypatch.undo()
        with pytest.raises(JournalError, match="Input/output error"):
            append_now(journal, call(1))


def test_a_killed_writer_loses_nothing_it_had_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    fields = {name: value for name, value in call(0).items() if name != "started"}
    script = (
        "import os; from array import array; from pathlib import Path\n"
        "from ratchet.tasks.recording.journal import Journal\n"
        "from tests.tasks.test_journal import append_now\n"
        f"journal = Journal(Path({str(path)!r}))\n"
        f"for number in range(50): append_now(journal, {fields!r} | {{'call': number}})\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert [span["call"] for span in read_journal(path)] == list(range(50))


def test_sealing_sorts_and_is_done_once(tmp_path: Path) -> None:
    journal = written(tmp_path / "j.jsonl", call(1), call(0, rollout=1), call(0))
    parquet = seal(journal, tmp_path / "spans" / "s.parquet")
    first = parquet.stat().st_mtime_ns
    assert read_spans(parquet)["span_id"].to_pylist() == ["0.0", "0.1", "1.0"]
    assert read_spans(parquet) == read_spans(journal)
    assert seal(journal, parquet).stat().st_mtime_ns == first


def test_a_journal_with_a_span_twice_is_not_sealed(tmp_path: Path) -> None:
    path = written(tmp_path / "j.jsonl", call(0))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(JournalError, match="twice"):
        seal(path, tmp_path / "s.parquet")
    assert not (tmp_path / "s.parquet").exists()


def test_token_columns_are_split_by_byte(tmp_path: Path) -> None:
    parquet = seal(written(tmp_path / "j.jsonl", call(2)), tmp_path / "s.parquet")
    group = pq.ParquetFile(parquet).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    for name in ("prompt_token_ids", "response_token_ids", "logprobs"):
        column = columns[f"{name}.list.element"]
        assert "BYTE_STREAM_SPLIT" in column.encodings
        assert (column.compression, column.has_dictionary_page) == ("ZSTD", False)


ROLE_CALLS = st.tuples(
    st.sampled_from(["grow", "edit", "anew", "again"]),
    st.integers(0, 5),  # of the calls so far, the one that it goes on from
    st.lists(st.integers(0, 1), max_size=2),
    st.lists(st.integers(0, 1), max_size=2),
    st.sampled_from(["policy", "guest"]),
    st.sampled_from(["00000", "00001"]),
)
ENDS = st.sampled_from([Reward(1.0), Failure("KeyError", "'city'")])
DIGITS = st.sampled_from([-0.0, -0.1, float(np.float32(-0.1)), -1e-45, -1e300, -3.0])


@st.composite
def played_rollouts(draw: st.DrawFn) -> list[Span]:
    """Draw the spans of two rollouts: calls that go on, branch, edit their history or begin anew.

    An attempt may fail, and the next one give the same calls again.
    """
    spans: list[Span] = []
    attempts: dict[int, int] = dict.fromkeys((0, 1), 0)
    for rollout, step in draw(
        st.lists(st.tuples(st.integers(0, 1), ROLE_CALLS | ENDS), max_size=12)
    ):
        attempt = attempts[rollout]
        if not isinstance(step, tuple):
            spans.append(ended(f"train-00000-0000-{rollout:02d}", step, attempt))
            attempts[rollout] += 1
            continue
        how, place, *tokens, role, version = step
        told, said = (array("i", part) for part in tokens)
        mine = [s for s in spans if s["kind"] == "llm" and s["role"] == role]
        mine = [s for s in mine if s["rollout_id"].endswith(f"{rollout:02d}")]
        number = sum(s["attempt"] == attempt for s in mine)
        before = mine[place % len(mine)] if mine else call(0)
        span = call(number, rollout) | {
            "attempt": attempt,
            "role": role,
            "prompt_token_ids": told,
            "messages": [{"role": "user", "content": str(token)} for token in told],
            "response_token_ids": said,
            "reply": {"role": "assistant", "content": [*said]},
            "logprobs": array("d", [draw(DIGITS) for _ in said]),
            "kept_tokens": 0,
            "policy_version": version,
            "tools": draw(st.sampled_from([[], [{"type": "function"}], [1], [True], [1.0]])),
        }
        if how in ("grow", "edit"):
            tokens = before["prompt_token_ids"] + before["response_token_ids"]
            messages = [*before["messages"], *filter(None, [before.get("reply")])]
            cut = draw(st.integers(0, len(tokens))) if how == "edit" else len(tokens)
            span["prompt_token_ids"] = tokens[:cut] + told
            span["messages"] = messages[:cut] + span["messages"]
            if how == "grow" and before["attempt"] == attempt:
                span["kept_call"] = before["call"]
        elif how == "again":
            span = before | {"attempt": attempt, "call": number, "role": role, "recalled": True}
            span["rollout_id"] = f"train-00000-0000-{rollout:02d}"
        spans.append(span)
    return spans


@given(spans=played_rollouts(), kills=st.lists(st.floats(0, 1), max_size=3))
def test_whatever_is_played_and_wherever_it_is_killed_each_span_is_read_back(
    spans: list[Span], kills: list[float]
) -> None:
    records: list[bytes] = []
    for kill in [*kills, 1.0]:
        read = read_records(records)
        assert as_json(read) == as_json(spans[: len(records)])
        calls = ShortCalls(read)
        records += [calls.write(span) for span in spans[len(records) :]]
        assert as_json(read_records(records)) == as_json(spans)
        records = records[: int(kill * len(records))]


def read_records(records: list[bytes]) -> list[Span]:
    calls = WholeCalls()
    return [calls.read(json.loads(record)) for record in records]


def test_a_call_that_goes_on_from_a_branch_is_read_back(tmp_path: Path) -> None:
    def goes_on(number: int, kept: int, *told: int) -> Span:
        tokens = {"prompt_token_ids": array("i", told), "response_token_ids": array("i", [9])}
        return call(number) | tokens | {"logprobs": array("d", [-0.5]), "kept_call": kept}

    spans = [
        goes_on(0, 0, 1),
        goes_on(1, 0, 1, 9, 2),
        goes_on(2, 0, 1, 9, 3),
        goes_on(3, 2, 1, 9, 2, 9, 4),
        goes_on(4, 2, 1, 9, 3, 9, 4),
    ]
    path = written(tmp_path / "j.jsonl", *spans)
    assert read_journal(path) == spans
    lines = [json.loads(line)["span"] for line in path.read_bytes().splitlines()]
    assert [line["prompt_token_ids"] for line in lines] == [[1], [2], [3], [2, 9, 4], [4]]


def as_json(spans: list[Span]) -> list[str]:
    """Return spans as texts, in which 1, 1.0 and true differ."""

    def plain(value: Any) -> object:
        return value.tolist() if isinstance(value, array) else value.isoformat()

    return [json.dumps(span, sort_keys=True, default=plain) for span in spans]


def test_a_journal_grows_with_what_is_new_in_a_call(tmp_path: Path) -> None:
    spans, prompt, random = [], array("i"), Random(0)
    for number in range(50):
        prompt = prompt + array("i", random.choices(range(32_000), k=100))
        answer = array("i", random.choices(range(32_000), k=100))
        logprobs = array("f", [-random.random() for _ in answer])
        spans.append(
            call(number)
            | {"prompt_token_ids": prompt, "response_token_ids": answer, "logprobs": logprobs}
        )
        prompt = prompt + answer
    path = written(tmp_path / "j.jsonl", *spans)
    assert read_journal(path) == spans
    assert path.stat().st_size < 200_000


def test_a_call_whose_earlier_call_was_removed_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "j.jsonl", call(0), call(1), call(2))
    first, _, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + last)
    with pytest.raises(JournalError, match="line 2, names a call of train-00000-0000-00 that is"):
        read_journal(path)


def test_a_span_that_could_not_be_written_is_named_by_no_later_one(tmp_path: Path) -> None:
    spans = [call(0), call(1) | {"attributes": {"seed": 10**30, "nan": math.nan}}, call(2)]
    with Journal(tmp_path / "j.jsonl") as journal:
        append_now(journal, spans[0])
        with pytest.raises(ValueError, match="Out of range"):
            append_now(journal, spans[1])
        append_now(journal, spans[2])
    assert read_journal(journal.path) == [spans[0], spans[2]]


def test_a_long_journal_is_sealed_in_row_groups_of_the_same_rows(tmp_path: Path) -> None:
    order = [(number, rollout) for number in range(100) for rollout in range(50)]
    with Journal(tmp_path / "j.jsonl") as journal:
        for number, rollout in order:
            journal.append(call(number, rollout))
    parquet = seal(journal.path, tmp_path / "s.parquet")
    assert read_spans(parquet) == read_spans(journal.path)
    groups = pq.ParquetFile(parquet).metadata
    rows = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
    assert rows == [4096, 904]
