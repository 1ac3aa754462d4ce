"""Shaping and filtering of a step's rewards, by a query of the recipe.

The query reads the table `rewards`, which has a row for each role of a rollout that has a reward:
`rollout_id`, `group_id`, `role`, `reward`, `tokens` (how many the role sampled), `calls`, and
`truncated` (whether an answer ended at its limit of tokens). It returns `rollout_id`, `role` and
`reward`, a finite number. A row that it leaves out, or whose reward is null, is neither compared
nor trained.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isfinite
from threading import Timer

import duckdb

from adapters.errors import UserError

TABLE = """
    create table rewards (
        rollout_id varchar, group_id varchar, role varchar, reward double, tokens bigint,
        calls bigint, truncated boolean
    )
"""
RESULT = ("rollout_id", "role", "reward")
NUMBER = re.compile(r"(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL\(.*\)|\"NULL\")$")
"""Types of DuckDB that a reward may have."""

LONGEST_QUERY = 10.0
"""Bound on the time of a query, in seconds."""
CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": "1",
    "memory_limit": "1GiB",
    "temp_directory": "",
}


class ShapingError(UserError, ValueError):
    """Refusal of the query `algorithm.rewards`, or of what it returns."""


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
    """Refuse (ShapingError) a query that cannot be run."""
    _run(query, [])


def shape_rewards(
    rewards: Sequence[RoleReward], query: str
) -> Mapping[tuple[str, str], float | None]:
    """Run the query; return the rewards by role and rollout.

    ShapingError if the query gives other rows than it was given, a reward that is not finite, or
    other rewards the second time.
    """
    shaped, again = _run(query, rewards), _run(query, rewards)
    by_name = {(role, rollout): reward for rollout, role, reward in shaped}
    if unknown := by_name.keys() - {(given.role, given.rollout_id) for given in rewards}:
        role, rollout = min(unknown)
        raise ShapingError(f"algorithm.rewards gives {role} of {rollout} a reward, which has none")
    if len(by_name) < len(shaped):
        raise ShapingError("algorithm.rewards gives a role of a rollout more than one reward")
    for (role, rollout), reward in by_name.items():
        if reward is not None and not isfinite(reward):
            raise ShapingError(
                f"algorithm.rewards gives {role} of {rollout} the reward {reward}; it must be a "
                "finite number, or null to leave the rollout out"
            )
    if sorted(shaped, key=str) != sorted(again, key=str):
        raise ShapingError(
            "algorithm.rewards gives other rewards each time, so the run could not be repeated; "
            "leave out what depends on chance, or on the clock"
        )
    return by_name


def _run(query: str, rewards: Sequence[RoleReward]) -> list[tuple[str, str, float | None]]:
    """Run the query where it can read nothing else, in bounded time and memory."""
    with duckdb.connect(config=CONFIG) as connection:
        connection.execute(TABLE)
        if rewards:
            columns = [list(column) for column in zip(*map(astuple, rewards), strict=True)]
            rows = ", ".join("unnest(?)" for _ in columns)
            connection.execute(f"insert into rewards select {rows}", columns)
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        limit = Timer(LONGEST_QUERY, connection.interrupt)
        limit.start()
        try:
            (statement,) = connection.extract_statements(query)
            found = connection.execute(statement)
            types = {column[0]: str(column[1]) for column in found.description or ()}
            rows = found.fetchall()
        except duckdb.InterruptException as error:
            raise ShapingError(
                f"algorithm.rewards takes more than {LONGEST_QUERY:g} s; let it end sooner"
            ) from error
        except (duckdb.Error, ValueError) as error:
            raise ShapingError(f"algorithm.rewards cannot be run: {error}") from error
        finally:
            limit.cancel()
    names = [*types]
    if sorted(names) != sorted(RESULT):
        raise ShapingError(
            f"algorithm.rewards returns {', '.join(names) or 'nothing'}; it must return "
            f"{', '.join(RESULT)}"
        )
    if not NUMBER.match(types["reward"]):
        raise ShapingError(
            f"algorithm.rewards returns {types['reward']} as reward; it must return a number, as "
            "`::double` makes one"
        )
    named = [dict(zip(names, row, strict=True)) for row in rows]
    return [
        (row["rollout_id"], row["role"], None if row["reward"] is None else float(row["reward"]))
        for row in named
    ]
