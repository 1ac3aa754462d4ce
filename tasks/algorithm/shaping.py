"""Shaping and filtering of a step's rewards, by a query of the recipe.

The query reads the table `rewards`, which has a row for each role of a rollout that has a reward:
`rollout_id`, `group_id`, `role`, `reward`, `tokens` (how many the role sampled), `calls`, and
`truncated` (whether an answer ended at its limit of tokens). It returns `rollout_id`, `role` and
`reward`. A row that it leaves out, or whose reward is null, is neither compared nor trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import duckdb

TABLE = """
    create table rewards (
        rollout_id varchar, group_id varchar, role varchar, reward double, tokens bigint,
        calls bigint, truncated boolean
    )
"""
RESULT = ("rollout_id", "role", "reward")


@dataclass(frozen=True)
class RoleReward:
    """Reward of a role of a rollout, and what the role did for it."""

    rollout_id: str
    group_id: str
    role: str
    reward: float
    tokens: int
    calls: int
    truncated: bool


def check_query(query: str) -> None:
    """Refuse (ValueError) a query that cannot be run."""
    _run(query, [])


def shape_rewards(
    rewards: Sequence[RoleReward], query: str
) -> Mapping[tuple[str, str], float | None]:
    """Run the query; return the rewards by role and rollout.

    ValueError if the query gives other rows than it was given, or not the same again.
    """
    shaped, again = _run(query, rewards), _run(query, rewards)
    by_name = {(role, rollout): reward for rollout, role, reward in shaped}
    if unknown := by_name.keys() - {(given.role, given.rollout_id) for given in rewards}:
        role, rollout = min(unknown)
        raise ValueError(f"algorithm.rewards gives {role} of {rollout} a reward, which has none")
    if len(by_name) < len(shaped):
        raise ValueError("algorithm.rewards gives a role of a rollout more than one reward")
    if sorted(shaped, key=str) != sorted(again, key=str):
        raise ValueError(
            "algorithm.rewards gives other rewards each time, so the run could not be repeated; "
            "leave out what depends on chance, or on the clock"
        )
    return by_name


def _run(query: str, rewards: Sequence[RoleReward]) -> list[tuple[str, str, float | None]]:
    """Run the query where it can read nothing else."""
    with duckdb.connect(config={"threads": "1"}) as connection:
        connection.execute(TABLE)
        if rewards:
            columns = [list(column) for column in zip(*map(astuple, rewards), strict=True)]
            rows = ", ".join("unnest(?)" for _ in columns)
            connection.execute(f"insert into rewards select {rows}", columns)
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        try:
            (statement,) = connection.extract_statements(query)
            found = connection.execute(statement)
            names = [column[0] for column in found.description or ()]
            rows = found.fetchall()
        except (duckdb.Error, ValueError) as error:
            raise ValueError(f"algorithm.rewards cannot be run: {error}") from error
    if sorted(names) != sorted(RESULT):
        raise ValueError(
            f"algorithm.rewards returns {', '.join(names) or 'nothing'}; it must return "
            f"{', '.join(RESULT)}"
        )
    order = [names.index(name) for name in RESULT]
    return [
        (row[order[0]], row[order[1]], None if row[order[2]] is None else float(row[order[2]]))
        for row in rows
    ]
