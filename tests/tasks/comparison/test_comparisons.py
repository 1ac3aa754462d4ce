"""held-out examples that several targets played → their record."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.errors import UserError
from ratchet.tasks.comparison.comparisons import (
    ComparedTarget,
    Comparison,
    most_different,
    read_played,
    write_comparison,
)
from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.reports.tables import calls_apart, describe_comparison
from ratchet.tasks.storage.tables import write_table

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CAT = {"example_id": 12, "example": {"answer": "cat"}}
ROSE = {"example_id": 3, "example": {"answer": "rose"}}


def row(name: str, seconds: int, attempt: int = 0, **columns: Any) -> dict[str, Any]:
    at = NOON + timedelta(seconds=seconds)
    whose = {"rollout_id": name, "group_id": name[:-3], "attempt": attempt}
    return {**whose, "span_id": f"{name}-{seconds}", "started": at, "ended": at, **columns}


def call(name: str, number: int, said: str, cost: float | None, **more: Any) -> dict[str, Any]:
    return row(
        name,
        number,
        **{"kind": "llm", "role": "policy", "call": number, "gen_ai_usage_output_tokens": 5},
        messages=[{"role": "user", "content": f"question {number}"}],
        reply={"role": "assistant", "content": said},
        attributes={"cost": cost},
        **more,
    )


def ended(name: str, of: dict[str, Any], reward: float | None, attempt: int = 0) -> dict[str, Any]:
    if reward is None:
        return row(name, 9, attempt, kind="error", error_type="KeyError", attributes=of)
    return row(name, 9, attempt, kind="reward", reward_name="reward", reward=reward, attributes=of)


def test_an_example_has_what_its_rollouts_came_to_and_what_every_attempt_has_cost(
    tmp_path: Path,
) -> None:
    spans = [
        call("test-00004-0000-00", 0, "lost", 0.25),
        call("test-00004-0000-00", 1, "meow", 0.5, attempt=1),
        call("test-00004-0000-00", 2, "a cat", None, attempt=1),
        {**call("test-00004-0000-00", 3, "no", 9.0), "role": "judge"},
        ended("test-00004-0000-00", CAT, 1.0, attempt=1),
        call("test-00004-0000-01", 0, "a dog", None, recalled=True),
        ended("test-00004-0000-01", CAT, 0.5),
        ended("test-00004-0001-00", ROSE, None),
    ]
    rose, cat = read_played(
        [write_table(spans_table(spans), tmp_path / "spans.parquet")], ["policy"]
    )
    assert (cat["rollouts"], cat["failed"], cat["reward"]) == (2, 0, 0.75)
    assert (cat["tokens"], cat["cost"]) == (7.5, 0.75)
    assert (cat["question"], cat["answer"]) == ("question 1", "a cat")
    assert (rose["example_id"], rose["failed"], rose["reward"]) == (3, 1, None)
    assert (rose["tokens"], rose["cost"], rose["answer"], rose["calls"]) == (None, None, None, [])
    assert cat["calls"] == [
        {"asked": "question 1", "said": "meow"},
        {"asked": "question 2", "said": "a cat"},
    ]


def target(name: str) -> ComparedTarget:
    return ComparedTarget(
        target=name,
        run=name,
        step=0,
        created="",
        evaluation="00000.json",
        rollouts=2,
        failed=0,
        reward=0.5,
        interval=None,
    )


def played(
    *rewards: float | None, answer: str = "cat", said: Sequence[str] = ()
) -> list[dict[str, Any]]:
    of = {"example": answer, "tokens": 2.0, "cost": None}
    of["calls"] = [{"asked": f"question {at}", "said": one} for at, one in enumerate(said)]
    return [{"example_id": place, "reward": reward, **of} for place, reward in enumerate(rewards)]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    return Comparison(
        folder="comparisons/one",
        agent="hello",
        recipe="",
        against="a",
        examples=0,
        targets=(target("a"), target("b")),
    )


def test_an_example_without_a_reward_of_either_is_in_no_difference(asked: Comparison) -> None:
    written = write_comparison(asked, {"a": played(0.0, None, 1.0), "b": played(1.0, 1.0, None)})
    difference = written.targets[1].difference
    assert difference is not None
    assert (difference.examples, difference.won, written.examples) == (1, 1, 3)
    assert write_comparison(asked, {}) == written, "what is written is read"


def test_targets_that_played_other_examples_are_not_compared(
    asked: Comparison, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="b and a have played other examples"):
        write_comparison(asked, {"a": played(1.0), "b": played(1.0, answer="dog")})
    assert list(tmp_path.iterdir()) == []


def test_two_targets_are_shown_where_they_differ_and_what_they_measure(asked: Comparison) -> None:
    ended = "I do not know."
    before = played(0.0, said=["look(1)", f"{'the key is in the ' * 20}box", ended])
    after = played(1.0, said=["look(1)", f"{'the key is in the ' * 20}jar", "take(jar)", ended])
    one, other = asked.targets
    measured = other.model_copy(update={"measures": {"measure/right": 0.25}})
    compared = asked.model_copy(update={"targets": (one, measured)})
    written = write_comparison(compared, {"a": before, "b": after})
    said = describe_comparison(written, {"b": most_different(written, "b")}, 200)
    assert said.splitlines()[0].split()[-1] == "right"
    assert "0.25" in said.splitlines()[2]
    (_, _, shown, _) = said.split("\n\n")
    first, of_after, of_before = shown.splitlines()
    assert first == "example 0, call 2: question 1"
    assert (of_after.endswith("in the jar"), of_before.endswith("in the box")) == (True, True)
    assert ended not in said


CALL = {"role": "policy", "asked": "Who?", "said": "x" * 900 + "cat" + "y" * 900}


def test_a_long_text_is_shown_around_where_it_differs() -> None:
    dog = CALL | {"said": str(CALL["said"]).replace("cat", "dog")}
    at, own, other = calls_apart([CALL, CALL], [CALL, dog], 160)
    assert (at, own["asked"], other["role"]) == (1, "Who?", "policy")
    for shown, word in ((own, "cat"), (other, "dog")):
        assert word in str(shown["said"])
        assert len(str(shown["said"])) <= 162
    at, own, other = calls_apart([CALL], [CALL, dog], 160)
    assert (at, own["said"], "dog" in str(other["said"])) == (1, "", False)
    assert calls_apart([CALL], [CALL], 160)[0] == 0
    assert calls_apart([], [], 160) == (0, {"asked": "", "said": ""}, {"asked": "", "said": ""})
