"""Steps that sample on until enough groups teach."""

from pathlib import Path

import pytest

from ratchet.adapters.calls import POLICY
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.recording.journal import SPAN_SCHEMA
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.rollouts import measure_yield
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table, write_table
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

ROLLOUTS = {"groups": 4, "group_size": 4, "max_tokens": 16}
RECIPE = small_recipe(steps=3, rollouts={**ROLLOUTS, "rounds": 4, "batches": 2})
whole = fixture_of(RECIPE)


def span(rollout: str, kind: str, **columns: object) -> dict:
    group = rollout.rpartition("-")[0]
    return {"rollout_id": rollout, "group_id": group, "attempt": 0, "kind": kind, **columns}


def reward(rollout: str, value: float, **columns: object) -> dict:
    return span(rollout, "reward", reward_name="reward", reward=value, **columns)


def call(rollout: str, tokens: int, **columns: object) -> dict:
    answer = {"call": 0, "role": POLICY, "response_token_ids": [7] * tokens}
    return span(rollout, "llm", **answer, **columns)


def test_groups_with_unequal_rewards_teach_and_calls_that_ended_are_counted(tmp_path: Path) -> None:
    import pyarrow as pa

    rows = [
        *(call("a-00", 3), reward("a-00", 0.0), call("a-01", 2), reward("a-01", 1.0)),
        *(call("b-00", 3), reward("b-00", 1.0), call("b-01", 4), reward("b-01", 1.0)),
        call("a-01", 2, attempt=1, recalled=True),
        *(span("b-00", "credit", role=POLICY, call=0, reward=0.1),),
        *(span("b-01", "credit", role=POLICY, call=0, reward=0.2),),
        *(call("c-00", 1), span("c-00", "error"), reward("c-01", 1.0)),
        *(call("d-00", 1), span("d-00", "credit", role="measure/x", reward=0.1)),
        *(reward("d-00", 1.0), call("d-01", 1), reward("d-01", 1.0)),
        span("d-01", "credit", role="measure/x", reward=0.2),
    ]
    path = write_table(pa.Table.from_pylist(rows, schema=SPAN_SCHEMA), tmp_path / "spans.parquet")
    assert measure_yield([path]) == (2, 6)


def rounds_of(run: RunFolder, step: int) -> int:
    """Return how many rounds of a step were played."""
    rows = read_shard(run.shard(f"train-{step:05d}"))
    played = {int(path.stem.rpartition(".")[2]) for path in run.sealed(f"train-{step:05d}")}
    rounds = {row["round"] for row in rows if row["batch"] in played}
    assert played == {row["batch"] for row in rows if row["round"] in rounds}, "a round is whole"
    assert rounds == set(range(len(rounds))), "and no round is left out"
    return len(rounds)


@pytest.mark.story
def test_a_step_plays_rounds_until_enough_groups_teach(whole: RunFolder) -> None:
    rounds = [rounds_of(whole, step) for step in range(RECIPE.steps)]
    assert max(rounds) > 1
    for step, count in enumerate(rounds):
        batches = whole.sealed(f"train-{step:05d}")
        teaching = measure_yield(batches)[0]
        before = measure_yield(batches[: 2 * (count - 1)])[0] if count > 1 else 0
        assert before < RECIPE.rollouts.groups, "the last round was needed"
        assert teaching >= RECIPE.rollouts.groups or count == RECIPE.rollouts.rounds
        groups = {*read_table(whole.datums(POLICY, step), ["group_id"])["group_id"].to_pylist()}
        assert len(groups) == teaching, "every group that teaches is trained"
    metrics = read_metrics(whole.metrics)
    assert [row["groups"] for row in metrics] == [4 * count for count in rounds]


@pytest.mark.story
def test_a_run_without_a_penalty_has_no_references(whole: RunFolder) -> None:
    assert not whole.references(POLICY, 0).parent.exists()


@pytest.mark.story
@pytest.mark.parametrize(
    "killed", [dying_in_batch("train-00001.2"), dying_in_update(2)], ids=["round", "update"]
)
def test_a_run_that_dies_in_a_round_continues_as_if_it_had_not(
    killed, whole: RunFolder, tmp_path: Path
) -> None:
    assert differences(die_and_go_on(RECIPE, killed, tmp_path), whole) == []


def test_rounds_of_what_ends_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="or give 1 round"):
        small_recipe(rollouts={**ROLLOUTS, "rounds": 2, "stream": True, "batches": 2})
