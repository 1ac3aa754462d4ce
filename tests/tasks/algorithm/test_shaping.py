"""Queries that shape and filter the rewards of a step; numbers by hand."""

import pyarrow as pa
import pytest

from ratchet.tasks.algorithm.shaping import ShapingError, check_query
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
        ("select reward from rewards", "returns reward; it must return rollout_id, role, reward"),
        ("select rollout_id, role, rewart as reward from rewards", 'column "rewart" not found'),
        ("select * from read_csv('/etc/passwd')", "cannot be run"),
        ("copy rewards to 'stolen.csv'", "cannot be run"),
        ("select 1; select 2", "cannot be run: it has 2 statements; give one SELECT"),
        ("select rollout_id, role, 'good' as reward from rewards", "returns VARCHAR as reward"),
        (
            "select rollout_id, role, [reward] as reward from rewards",
            r"returns DOUBLE\[\] as reward",
        ),
        ("select rollout_id, role, reward > 0 as reward from rewards", "returns BOOLEAN as reward"),
        ("", "cannot be run: it has 0 statements"),
        ("select list(i) from range(1000000000000) t(i)", "cannot be run: Out of Memory"),
    ],
)
def test_a_query_that_cannot_be_run_is_refused_with_the_recipe(query: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_recipe(algorithm={"rewards": query})


@pytest.mark.parametrize(
    ("query", "said"),
    [
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


def test_a_query_that_does_not_end_is_refused_with_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ratchet.tasks.algorithm.shaping.LONGEST_QUERY", 0.5)
    endless = "with recursive r(n) as (select 1 union all select n + 1 from r)"
    rows = "select 'a' as rollout_id, 'policy' as role, max(n) as reward from r"
    with pytest.raises(ValueError, match=r"takes more than 0.5 s of processor time; let it end"):
        small_recipe(algorithm={"rewards": f"{endless} {rows}"})


@pytest.mark.parametrize(
    "reward",
    [
        "levenshtein(repeat('a', 3000000), repeat('b', 3000000))::double",
        "list_aggregate([md5(repeat(i::varchar, 100000)) for i in range(10000000)], 'min')::double",
        "(select count(*) from generate_series(1, 1000000) a, generate_series(1, 1000000) b)",
    ],
)
def test_a_single_call_of_a_function_ends_in_time_as_well(
    monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    monkeypatch.setattr("ratchet.tasks.algorithm.shaping.LONGEST_QUERY", 0.5)
    with pytest.raises(ShapingError, match=r"takes more than 0.5 s of processor time"):
        check_query(f"select 'a' as rollout_id, 'policy' as role, {reward} as reward")
    assert shaped(SOFT_OVERLONG) == {"00": 1.0, "01": -0.5, "02": 0.0}


def test_a_query_that_is_planned_without_end_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ratchet.tasks.algorithm.shaping.LONGEST_QUERY", 0.5)
    nested = [
        f"t{i} as not materialized (from t{i - 1} union all from t{i - 1})" for i in range(1, 31)
    ]
    with pytest.raises(ShapingError, match="takes more than"):
        check_query(", ".join(["with t0 as (from rewards)", *nested]) + " from t30")


def test_a_query_that_sleeps_is_ended_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.adapters.process.child.LONGEST_WAIT", 2)
    with pytest.raises(ShapingError, match="takes more than 2 s; let it end sooner"):
        check_query("select 'a' as rollout_id, 'policy' as role, sleep_ms(100000) as reward")


@pytest.mark.parametrize(
    "reward",
    [
        "length(repeat(repeat('ab', 30000), 40000))",
        "length(format('{:>2000000000}', 'a'))",
        "bit_count(repeat('1', 2000000000)::bit)",
        "len(list_sort(range(400000000)))",
        "len(list_transform(range(100000), lambda x: range(100000)))",
    ],
)
def test_values_of_gigabytes_are_refused(reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.tasks.algorithm.shaping.LONGEST_QUERY", 2)
    with pytest.raises(ShapingError, match=r"Out of Memory|takes more than|Invalid Input"):
        check_query(f"select 'a' as rollout_id, 'policy' as role, {reward} as reward")


@pytest.mark.parametrize(
    "query",
    [
        "set memory_limit = '100GB'",
        "pragma threads = 64",
        "attach 'other.db'",
        "install httpfs",
        "export database 'all'",
        "select * from glob('/etc/*')",
        "select content from read_text('/etc/hostname')",
        "select * from query('select * from read_text(''/etc/hostname'')')",
        "select getenv('HOME') as rollout_id, 'policy' as role, 1 as reward",
        "from given",
    ],
)
def test_a_query_reads_nothing_else_and_changes_no_setting(query: str) -> None:
    with pytest.raises(ShapingError, match="cannot be run"):
        check_query(query)


def test_a_reward_that_calls_have_is_not_shaped_in_vain() -> None:
    rows = table(trajectory(0, 3.0, [1.0, 2.0]), trajectory(1, 1.0, [1.0]))
    doubled = "select rollout_id, role, 2 * reward as reward from rewards"
    with pytest.raises(ValueError, match="calls have rewards of their own"):
        rewards_by_group(rows, shaping=doubled)
    first = "select rollout_id, role, reward from rewards where calls = 1"
    assert [*rewards_by_group(rows, shaping=first)[GROUP].values()] == [1.0]
