"""Queries that shape and filter the rewards of a step; numbers by hand."""

import pyarrow as pa
import pytest

from ratchet.tasks.algorithm.shaping import check_query
from tests.support.credited import build, credited, rewards_by_group
from tests.support.runs.small_recipe import small_recipe
from tests.support.trajectory_rows import table
from tests.tasks.test_credit import GROUP, trajectory

SOFT_OVERLONG = """
    select rollout_id, role, reward - greatest(0, least(1, (tokens - 2) / 4)) as reward
    from rewards
"""


def rollouts() -> pa.Table:
    """Rollouts of 2, 4 and 6 sampled tokens, of which the last was cut short."""
    return table(
        trajectory(0, 1.0, [None]),
        trajectory(1, 0.0, [None, None]),
        trajectory(2, 1.0, [None, None, None]) | {"truncated": True},
    )


def shaped(query: str) -> dict[str, float]:
    group = rewards_by_group(rollouts(), shaping=query)[GROUP]
    return {name[-2:]: reward for name, reward in group.items()}


def test_long_answers_may_be_punished() -> None:
    """DAPO's soft overlong punishment, with 2 tokens free and 4 over which it rises to 1."""
    assert shaped(SOFT_OVERLONG) == {"00": 1.0, "01": -0.5, "02": 0.0}


def test_truncated_answers_may_be_left_out() -> None:
    query = "select rollout_id, role, reward from rewards where not truncated"
    assert shaped(query) == {"00": 1.0, "01": 0.0}
    datums = build(rollouts(), credited("centred", rewards=query))
    assert datums["advantage"].to_pylist() == [0.5, -0.5]


def test_rewards_may_be_scaled_within_their_group() -> None:
    query = """
        select rollout_id, role, reward / sum(reward) over (partition by group_id) as reward
        from rewards
    """
    assert shaped(query) == {"00": 0.5, "01": 0.0, "02": 0.5}


def test_a_null_reward_leaves_a_rollout_out() -> None:
    assert shaped("select rollout_id, role, nullif(reward, 0) as reward from rewards") == {
        "00": 1.0,
        "02": 1.0,
    }


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select reward from rewards", 'column "rollout_id" not found'),
        ("select rollout_id, role, rewart as reward from rewards", 'column "rewart" not found'),
        ("select * from read_csv('/etc/passwd')", "file system operations are disabled"),
        ("from given", "given does not exist"),
        ("set memory_limit = '100GB'", "syntax error"),
        ("select 1; select 2", "syntax error"),
        ("", "syntax error"),
        ("select list(i) from range(1000000000000) t(i)", "give one SELECT that returns"),
    ],
)
def test_a_query_that_cannot_be_run_is_refused_with_the_recipe(query: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_recipe(algorithm={"rewards": query})


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select rollout_id, role, 'good' as reward from rewards", "Could not convert"),
        ("select rollout_id, role, random() as reward from rewards", "other rewards each time"),
        ("select 'nobody' as rollout_id, role, reward from rewards", "of nobody a reward"),
        (
            "select a.rollout_id, a.role, a.reward from rewards as a, rewards as b",
            "more than one reward",
        ),
        (
            "select rollout_id, role, 0 * reward / 0 as reward from rewards",
            "the reward nan; it must",
        ),
        ("select rollout_id, role, 1.0 / 0 as reward from rewards", "the reward inf; it must"),
    ],
)
def test_a_query_that_gives_other_rewards_than_a_step_s_is_refused(query: str, said: str) -> None:
    check_query(query)
    with pytest.raises(ValueError, match=said):
        shaped(query)


def test_a_reward_that_calls_have_is_not_shaped_in_vain() -> None:
    rows = table(trajectory(0, 3.0, [1.0, 2.0]), trajectory(1, 1.0, [1.0]))
    doubled = "select rollout_id, role, 2 * reward as reward from rewards"
    with pytest.raises(ValueError, match="calls have rewards of their own"):
        rewards_by_group(rows, shaping=doubled)
    first = "select rollout_id, role, reward from rewards where calls = 1"
    assert [*rewards_by_group(rows, shaping=first)[GROUP].values()] == [1.0]
