"""Shaping and filtering of a step's rewards, by a query of the recipe.

The query reads the table `rewards`, which has a row for each role of a rollout that has a reward:
`rollout_id`, `group_id`, `role`, `reward`, `tokens` (how many the role sampled), `calls`, and
`truncated` (whether an answer ended at its limit of tokens). It returns `rollout_id`, `role` and
`reward`, a number. A row that it leaves out, or whose reward is null, is neither compared
nor trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from ratchet.adapters.errors import UserError
from ratchet.adapters.rewards import LARGEST

TABLE = """
    create table rewards (
        rollout_id varchar, group_id varchar, role varchar, reward double, tokens bigint,
        calls bigint, truncated boolean
    )
"""
SELECTED = "select rollout_id, role, reward::double from ({}\n)"
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
        if reward is not None and not abs(reward) <= LARGEST:
            raise ShapingError(
                f"algorithm.rewards gives {role} of {rollout} the reward {reward}; it must be a "
                f"number of at most {LARGEST:,.0f} in size, or null to leave the rollout out"
            )
    if sorted(shaped, key=str) != sorted(again, key=str):
        raise ShapingError(
            "algorithm.rewards gives other rewards each time, so the run could not be repeated; "
            "leave out what depends on chance, or on the clock"
        )
    return by_name


def _run(query: str, rewards: Sequence[RoleReward]) -> list[tuple[str, str, float | None]]:
    """Run the query over the rows of `rewards`, beside which it can read nothing."""
    import duckdb  # loads slowly, and few recipes have a query

    try:
        with duckdb.connect(config=CONFIG) as connection:
            connection.execute(TABLE)
            if rewards:
                columns = [list(column) for column in zip(*map(astuple, rewards), strict=True)]
                unnested = ", ".join("unnest(?)" for _ in columns)
                connection.execute(f"insert into rewards select {unnested}", columns)
            connection.execute("set enable_external_access = false")
            return connection.execute(SELECTED.format(query.strip().rstrip(";"))).fetchall()
    except duckdb.Error as error:
        raise ShapingError(
            f"algorithm.rewards cannot be run: {error}; give one SELECT that returns rollout_id, "
            "role and the number reward"
        ) from error
