"""Runs whose rollouts are compared with a greedy rollout of the same example."""

from pathlib import Path

import pytest

from adapters.calls import POLICY
from flows.replay import replay
from tasks.recording.step_log import read_metrics
from tasks.storage.run_folder import RunError, RunFolder
from tasks.storage.tables import read_table, select
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

RECIPE = small_recipe(steps=2, algorithm={"advantage": "remax"}, evaluation={"examples": 1})
whole = fixture_of(RECIPE)

REWARDS = """
    select group_id, any_value(reward) as reward, any_value(temperature) as temperature
    from (
        select
            group_id,
            reward,
            max(gen_ai_request_temperature) over (partition by rollout_id) as temperature
        from parquet_rows($spans)
        qualify reward_name = 'reward'
    )
    group by group_id
"""


@pytest.mark.story
def test_an_advantage_is_the_reward_beside_that_of_the_greedy_rollout(whole: RunFolder) -> None:
    greedy = select(REWARDS, spans=[str(p) for p in whole.sealed("baseline-00000")]).to_pylist()
    assert len(greedy) == RECIPE.rollouts.groups
    assert {row["temperature"] for row in greedy} == {0.0}
    baselines = {row["group_id"].replace("baseline", "train"): row["reward"] for row in greedy}
    rows = read_table(whole.trajectories(POLICY, 0)).to_pylist()
    assert len(rows) == RECIPE.rollouts.groups * RECIPE.rollouts.group_size
    assert all(row["baseline"] == baselines[row["group_id"]] for row in rows)
    datums = read_table(whole.datums(POLICY, 0)).to_pylist()
    assert datums, "something is learnt"
    for row in datums:
        assert row["advantage"] == pytest.approx(row["reward"] - baselines[row["group_id"]])


@pytest.mark.story
def test_greedy_rollouts_are_paid_for_but_not_counted_as_the_step_s(whole: RunFolder) -> None:
    size = RECIPE.rollouts.groups * RECIPE.rollouts.group_size
    for row in read_metrics(whole.metrics):
        assert (row["rollouts/ok"], row["groups"]) == (size, RECIPE.rollouts.groups)
        assert row["calls"] == size + RECIPE.rollouts.groups


@pytest.mark.story
def test_recorded_rollouts_without_greedy_ones_are_not_compared_with_them(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    for journal in (whole.path / "journal").glob("baseline-*"):
        journal.rename(tmp_path / journal.name)
    try:
        with pytest.raises(RunError, match="has no greedy rollouts, with which"):
            replay(RECIPE, "whole", run="replayed")
    finally:
        for journal in tmp_path.glob("baseline-*"):
            journal.rename(whole.path / "journal" / journal.name)


@pytest.mark.story
@pytest.mark.parametrize(
    "killed",
    [dying_in_batch("baseline-00001.0"), dying_in_update(0)],
    ids=["greedy batch", "update"],
)
def test_a_run_that_dies_continues_as_if_it_had_not(killed, whole, tmp_path) -> None:
    assert differences(die_and_go_on(RECIPE, killed, tmp_path), whole) == []
