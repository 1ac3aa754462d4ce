"""rollouts of a batch → games, a line each."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.reports.rollouts import list_games, read_games
from ratchet.tasks.storage.tables import write_table

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
LOOK = {"type": "function", "function": {"name": "search", "arguments": "{}"}}
CAT = {"example_id": 12, "example": {"answer": "cat", "category": "animal", "split": "test"}}


def row(seconds: int, attempt: int = 1, place: int = 0, **columns: Any) -> dict[str, Any]:
    group = f"test-00004-{place:04d}"
    began = BEGAN + timedelta(seconds=seconds)
    whose = {"rollout_id": f"{group}-00", "group_id": group, "attempt": attempt}
    return {**whose, "started": began, "ended": began, **columns}


def call(seconds: int, role: str, question: str, response: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "play"}, {"role": "user", "content": question}]
    reply = {"role": "assistant", "content": response, **more}
    return row(seconds, kind="llm", role=role, call=seconds, messages=messages, reply=reply)


@pytest.fixture
def spans(tmp_path: Path) -> Path:
    rows = [
        row(0, attempt=0, kind="error", error_type="KeyError", error_message="x", attributes=CAT),
        call(1, "policy", "turn 1", "", tool_calls=[LOOK]),
        call(2, "policy", "found", "Is it alive?"),
        call(3, "answerer", "Is it alive?", "yes"),
        call(4, "policy", "turn 2", "Is it a cat?"),
        call(5, "answerer", "Is it a cat?", "correct"),
        row(6, kind="reward", reward_name="reward", reward=1.0, attributes=CAT),
        row(
            7,
            place=1,
            kind="error",
            error_type="TimeoutError",
            error_message="late",
            attributes={"example_id": 3, "example": {"answer": "rose", "category": "flower"}},
        ),
    ]
    return write_table(spans_table(rows), tmp_path / "spans.parquet")


def test_a_game_has_its_example_how_it_went_and_what_was_said(spans: Path) -> None:
    won = read_games([spans])[0]
    assert (won["index"], won["answer"], won["category"]) == (12, "cat", "animal")
    assert "split" not in read_games([spans], ["answer"])[0]
    assert (won["reward"], won["correct"], won["error"]) == (1.0, True, None)
    assert read_games([spans], threshold=1.5)[0]["correct"] is False
    assert (won["turn_index"], won["num_tool_calls"]) == (2, 1)
    turns: Any = won["interactions"]
    said = [(turn["role"], turn["question"], turn["response"]) for turn in turns]
    assert said == [
        ("policy", "turn 1", "search({})"),
        ("policy", "found", "Is it alive?"),
        ("answerer", "Is it alive?", "yes"),
        ("policy", "turn 2", "Is it a cat?"),
        ("answerer", "Is it a cat?", "correct"),
    ]


def test_a_failed_game_is_neither_won_nor_lost(spans: Path) -> None:
    failed = read_games([spans])[1]
    assert failed["error"] == "TimeoutError: late"
    assert (failed["index"], failed["reward"], failed["correct"]) == (3, None, None)
    assert (failed["turn_index"], failed["interactions"]) == (0, [])


def test_a_refused_call_is_told_with_its_game_and_makes_none(tmp_path: Path) -> None:
    why = {
        "error_type": "context_length_exceeded",
        "error_message": "9 tokens, and 8 are the limit",
    }
    refused = {"kind": "refused", "role": "policy", "call": 0, "status": "error", **why}
    rows = [
        row(1, **refused),
        row(2, kind="reward", reward_name="reward", reward=1.0, attributes=CAT),
        row(3, place=1, **refused),
        row(4, place=1, kind="left_out"),
    ]
    (game,) = read_games([write_table(spans_table(rows), tmp_path / "spans.parquet")])
    told = "context_length_exceeded: 9 tokens, and 8 are the limit"
    assert game["refused"] == [{"role": "policy", "why": told}]


def test_games_are_written_a_line_each(spans: Path, tmp_path: Path) -> None:
    path = tmp_path / "games.jsonl"
    list_games(path, [spans])
    assert [json.loads(line) for line in path.read_text().splitlines()] == read_games([spans])
