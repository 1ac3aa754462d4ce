"""rollouts of a held-out split → scores."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import pytest

from ratchet.tasks.evaluations import (
    PlayedShard,
    ScoredRollout,
    find_reward_gain,
    score_outcomes,
    score_rollouts,
    score_spans,
)
from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.recording.scores import Spent, read_evaluation
from ratchet.tasks.reports.tables import score_rows
from ratchet.tasks.storage.files import read_json, write_rows
from ratchet.tasks.storage.names import group_name, shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import write_table

EARNED = {"kind": "reward", "reward_name": "reward", "reward": 1.0}


def written_shard(path: Path, *examples: dict[str, str]) -> Path:
    rows = [{"example_id": place, "example": row, "batch": 0} for place, row in enumerate(examples)]
    return write_rows(path, rows)


def outcomes(**groups: Sequence[float | None]) -> list[ScoredRollout]:
    return [ScoredRollout(group, reward) for group, rewards in groups.items() for reward in rewards]


def test_the_mean_is_over_examples_and_so_is_its_error() -> None:
    result = score_outcomes(outcomes(a=[1.0, 1.0, 1.0, 0.0], b=[0.25], c=[0.5]))
    # Means .75, .25 and .5: their deviation is .25.
    assert result.finished.mean == 0.5
    assert result.finished.standard_error == pytest.approx(0.25 / sqrt(3))
    assert result.finished.examples == 3


def test_a_failed_rollout_is_counted_and_stated_both_ways() -> None:
    result = score_outcomes(outcomes(a=[1.0, None], b=[0.0, 1.0], c=[None, None]))
    assert (result.rollouts, result.failed) == (6, 3)
    assert (result.finished.examples, result.finished.mean) == (2, 0.75)
    assert (result.failed_as_zero.examples, result.failed_as_zero.mean) == (3, pytest.approx(1 / 3))
    assert result.finished.pass_at == {1: 0.75}
    assert result.failed_as_zero.pass_at == {1: pytest.approx(1 / 3), 2: pytest.approx(2 / 3)}


def test_pass_at_is_told_for_doublings_of_k() -> None:
    result = score_outcomes(outcomes(a=[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], b=[0.0] * 6))
    assert result.finished.pass_at == pytest.approx({1: 1 / 12, 2: 2 / 12, 4: 4 / 12, 6: 0.5})


def test_a_rollout_passes_at_its_threshold() -> None:
    assert score_outcomes(outcomes(a=[0.5, 0.4]), threshold=0.5).finished.pass_at[1] == 0.5


def test_nothing_has_no_mean() -> None:
    result = score_outcomes([])
    assert (result.rollouts, result.finished.mean, result.finished.pass_at) == (0, None, {})
    assert score_outcomes(outcomes(a=[1.0])).finished.standard_error is None


def test_headline_numbers_are_flat() -> None:
    assert score_outcomes(outcomes(a=[1.0], b=[None])).metrics("test") == {
        "test/reward/mean": 1.0,
        "test/reward/mean_failed_as_zero": 0.5,
        "test/rollouts/failed": 1,
        "test/pass@1": 0.5,
    }


def test_a_batch_is_scored_from_its_spans_and_by_category(tmp_path: Path) -> None:
    categories = ["animal", "animal", "flower"]
    shard = written_shard(tmp_path / "s.jsonl", *({"category": name} for name in categories))

    def ended(place: int, reward: float | None, attempt: int = 0) -> dict:
        group = f"test-00010-{place:04d}"
        row = {"rollout_id": f"{group}-00", "group_id": group, "attempt": attempt}
        if reward is None:
            return row | {"kind": "error", "error_type": "TimeoutError"}
        return row | EARNED | {"reward": reward}

    rows = [ended(0, 1.0), ended(1, None), ended(1, 0.5, attempt=1), ended(2, None)]
    spans = write_table(spans_table(rows), tmp_path / "spans.parquet")
    result = score_spans([spans], shard)
    assert (result.rollouts, result.failed, result.finished.mean) == (3, 1, 0.75)
    assert result.categories["animal"].finished.mean == 0.75
    assert result.categories["flower"].failed == 1
    assert result.categories["flower"].finished.mean is None


def test_what_an_agent_measures_is_a_mean_over_the_attempts_that_ended(tmp_path: Path) -> None:
    shard = written_shard(tmp_path / "s.jsonl", {"category": "animal"}, {"category": "flower"})

    def ended(place: int, attempt: int, measured: float, **end: object) -> list[dict]:
        group = f"test-00010-{place:04d}"
        row = {"rollout_id": f"{group}-00", "group_id": group, "attempt": attempt}
        credit = {"kind": "credit", "role": "measure/a b.", "reward_name": "role"}
        return [row | credit | {"reward": measured}, row | EARNED | end]

    failed = {"kind": "error", "reward_name": None, "reward": None}
    rows = [*ended(0, 0, 9.0, **failed), *ended(0, 1, 0.25), *ended(1, 0, 0.75, reward=None)]
    result = score_spans([write_table(spans_table(rows), tmp_path / "spans.parquet")], shard)
    assert (result.measures, result.failed) == ({"measure/a b.": 0.5}, 0)
    assert result.categories["flower"].measures == {"measure/a b.": 0.75}
    assert result.metrics()["test/measure/a b."] == 0.5
    (names, [row, *_]) = score_rows({"sampled": result})
    assert (names[-1], row[-1]) == ("a b.", 0.5)


def test_examples_without_a_category_have_none(tmp_path: Path) -> None:
    shard = written_shard(tmp_path / "s.jsonl", {"question": "?"})
    row = {"rollout_id": "test-00000-0000-00", "group_id": "test-00000-0000", "attempt": 0}
    spans = write_table(spans_table([row | EARNED]), tmp_path / "spans.parquet")
    assert score_spans([spans], shard).categories == {}


def test_what_roles_spent_is_summed_over_every_attempt(tmp_path: Path) -> None:
    shard = written_shard(tmp_path / "s.jsonl", {"category": "animal"})

    def call(number: int, cost: float | None = None, **columns: object) -> dict:
        return {
            "rollout_id": "test-00000-0000-00",
            "group_id": "test-00000-0000",
            "attempt": 0,
            "span_id": str(number),
            "kind": "llm",
            "role": "judge",
            "gen_ai_provider_name": "other",
            "gen_ai_usage_input_tokens": 10,
            "gen_ai_usage_output_tokens": 2,
            "attributes": {"cost": cost},
            **columns,
        }

    rows = [
        call(0, 0.25, attempt=0),
        call(1, 0.5, attempt=1),
        call(2, 0.25, attempt=1, recalled=True),
        call(3),
        call(4, role="seer"),
        call(5, role="policy", gen_ai_provider_name="ratchet", attributes={}),
        call(6, attempt=1, kind="error", role=None, error_type="TimeoutError"),
    ]
    spans = write_table(spans_table(rows), tmp_path / "spans.parquet")
    result = score_spans([spans], shard)
    judge = Spent(calls=3, priced=2, prompt_tokens=30, sampled_tokens=6, cost=0.75)
    seer = Spent(calls=1, priced=0, prompt_tokens=10, sampled_tokens=2, cost=None)
    assert result.spent == result.categories["animal"].spent == {"judge": judge, "seer": seer}
    assert result.metrics("test")["test/cost/judge"] == 0.75
    assert "test/cost/seer" not in result.metrics("test")


def test_an_evaluation_is_a_file_that_reads_back(tmp_path: Path) -> None:
    shard = written_shard(tmp_path / "s.jsonl", {"category": "animal"})
    place = {"group_id": "test-00010-0000", "attempt": 0}
    rows = [place | EARNED | {"rollout_id": f"test-00010-0000-{k:02d}"} for k in (0, 1)]
    rows[1] |= {"kind": "error", "reward_name": None, "reward": None}
    spans = write_table(spans_table(rows), tmp_path / "spans.parquet")
    played, path = PlayedShard(shard, [spans]), tmp_path / "evaluations" / "00010.json"
    score_rollouts(path, {"greedy": played, "sampled": played}, threshold=0.5)
    scores = read_evaluation(path)
    assert scores["greedy"] == scores["sampled"] == score_spans([spans], shard, threshold=0.5)
    written = read_json(path)["sampled"]
    assert (written["rollouts"], written["failed"], written["threshold"]) == (2, 1, 0.5)


def recorded_evaluation(run: RunFolder, step: int, rewards: Sequence[float | None]) -> None:
    """Record what a checkpoint has earned of each held-out example, and its scores."""
    shard = shard_name("test", step)
    written_shard(run.shard(shard), *({"question": "?"} for _ in rewards))
    rows = []
    for place, reward in enumerate(rewards):
        group = group_name(shard, place)
        row = {"rollout_id": f"{group}-00", "group_id": group, "attempt": 0}
        rows.append(
            row | (EARNED | {"reward": reward} if reward is not None else {"kind": "error"})
        )
    spans = write_table(spans_table(rows), run.spans(f"{shard}.0"))
    played = PlayedShard(run.shard(shard), [spans])
    score_rollouts(run.evaluation(f"{step:05d}"), {"sampled": played}, 1.0)


def test_the_gain_of_rewards_is_that_of_each_example(tmp_path: Path) -> None:
    """Examples differ by far more than any of them gains; the third failed at one checkpoint."""
    run = RunFolder(tmp_path)
    before = [0.0, 0.25, 0.5, 0.75, 0.5, 0.0, 0.25, 0.75]
    after = [value + 0.25 + 0.01 * (place % 2) for place, value in enumerate(before)]
    recorded_evaluation(run, 0, [*before[:2], None, *before[3:]])
    recorded_evaluation(run, 5, after)
    gain = find_reward_gain(run, 0, 5)
    assert gain is not None
    assert gain.examples
    assert gain.value == pytest.approx(0.25 + 0.04 / 7)
    assert gain.interval[1] - gain.interval[0] < 0.02
    run.spans("test-00005.0").unlink()
    apart = find_reward_gain(run, 0, 5)
    assert apart is not None
    assert not apart.examples
    assert apart.interval[1] - apart.interval[0] > 0.4
