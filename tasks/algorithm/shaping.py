"""Shaping and filtering of a step's rewards, by a query of the recipe.

The query reads the table `rewards`, which has a row for each role of a rollout that has a reward:
`rollout_id`, `group_id`, `role`, `reward`, `tokens` (how many the role sampled), `calls`, and
`truncated` (whether an answer ended at its limit of tokens). It returns `rollout_id`, `role` and
`reward`, a finite number. A row that it leaves out, or whose reward is null, is neither compared
nor trained.
"""

import atexit
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isfinite

import duckdb

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.child import LimitedChild, LimitMet, answer_questions

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
"""Bound on the processor time of a query, in seconds."""
QUERY_MEMORY = 1536 * 1024 * 1024
"""Bound on the memory of the process that runs queries, in bytes; DuckDB's own is lower."""
LONGEST_ERROR, LONGEST_RETURNED_NAME = 1000, 300
"""Letters of an error, and of a name that a query returns."""
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


def _run(query: str, rewards: Sequence[RoleReward]) -> Sequence[tuple[str, str, float | None]]:
    """Run the query in a child, where it can read nothing else, in bounded time and memory."""
    try:
        answer = _child.ask([query, [astuple(reward) for reward in rewards]], LONGEST_QUERY)
    except LimitMet as met:
        remedy = "make less" if "memory" in met.took else "end sooner"
        raise ShapingError(
            f"algorithm.rewards takes more than {met.took}; let it {remedy}"
        ) from None
    if isinstance(answer, str):
        raise ShapingError(answer)
    return [(rollout, role, reward) for rollout, role, reward in answer]


_child = LimitedChild("ratchet.tasks.algorithm.shaping", QUERY_MEMORY)
atexit.register(_child.close)


def _answer(question: tuple[str, Sequence[Sequence[object]]]) -> object:
    """Run a query over the rows of `rewards`; return its rows, or why there are no rows."""
    query, given = question
    try:
        with duckdb.connect(config=CONFIG) as connection:
            _fill(connection, given)
            found = connection.execute(_only_statement(connection, query))
            _check_columns({name: str(kind) for name, kind, *_ in found.description or ()})
            # A role of a rollout has one row, so whatever is wrong shows in one row too many.
            names = [column[0] for column in found.description or ()]
            rows = [dict(zip(names, r, strict=True)) for r in found.fetchmany(len(given) + 1)]
    except ShapingError as error:
        return str(error)
    except (duckdb.Error, ValueError, MemoryError) as error:
        return f"algorithm.rewards cannot be run: {str(error)[:LONGEST_ERROR]}"
    return [
        (
            *(str(row[name])[:LONGEST_RETURNED_NAME] for name in ("rollout_id", "role")),
            None if row["reward"] is None else float(row["reward"]),
        )
        for row in rows
    ]


def _only_statement(connection: "duckdb.DuckDBPyConnection", query: str) -> "duckdb.Statement":
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise ShapingError(
            f"algorithm.rewards cannot be run: it has {counted(len(statements), 'statement')}; "
            "give one SELECT"
        )
    return statements[0]


def _check_columns(types: Mapping[str, str]) -> None:
    if sorted(types) != sorted(RESULT):
        raise ShapingError(
            f"algorithm.rewards returns {', '.join(types) or 'nothing'}; it must return "
            f"{', '.join(RESULT)}"
        )
    if not NUMBER.match(types["reward"]):
        raise ShapingError(
            f"algorithm.rewards returns {types['reward']} as reward; it must return a number, as "
            "`::double` makes one"
        )


def _fill(connection: "duckdb.DuckDBPyConnection", given: Sequence[Sequence[object]]) -> None:
    """Make the table `rewards`; a query can read nothing else, and change no setting."""
    connection.execute(TABLE)
    if given:
        columns = [list(column) for column in zip(*given, strict=True)]
        unnested = ", ".join("unnest(?)" for _ in columns)
        connection.execute(f"insert into rewards select {unnested}", columns)
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")


if __name__ == "__main__":
    answer_questions(_answer, QUERY_MEMORY)
