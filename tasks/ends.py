"""How a rollout ended → its spans: an error, or its reward and what its roles and calls earned."""

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime

from adapters.harness.rewards import Reward, RewardError, check_roles
from tasks.spans import Span, credit_span, error_span, reward_span

Times = tuple[datetime, datetime]
"""When an attempt began and ended."""

Calls = Mapping[str, Collection[int]]
"""Role → the numbers of its calls that were answered; a role without any is there too."""


def end_spans(
    rollout_id: str,
    attempt: int,
    outcome: Reward | Exception,
    calls: Calls,
    times: Times,
    run_id: str | None = None,
) -> list[Span]:
    """The spans of an end, in the order in which they are recorded.

    The last is the error or the reward. Without it the others count for nothing, so a rollout is
    never half rewarded. A reward that does not fit the roles and their calls is an error too.
    """
    if isinstance(outcome, Reward):
        try:
            check_roles(outcome, {role: len(numbers) for role, numbers in calls.items()})
        except RewardError as error:
            outcome = error
    if isinstance(outcome, Exception):
        return [error_span(rollout_id, attempt, outcome, *times, run_id=run_id)]
    credits = [
        credit_span(rollout_id, attempt, reward, *times, role=role, call=call, run_id=run_id)
        for role, call, reward in _credits(outcome, calls)
    ]
    return [*credits, reward_span(rollout_id, attempt, outcome.value, *times, run_id=run_id)]


def _credits(reward: Reward, calls: Calls) -> Iterator[tuple[str, int | None, float]]:
    for role, earned in reward.roles.items():
        yield role, None, earned
    for role, rewards in reward.calls.items():
        for call, earned in zip(sorted(calls[role]), rewards, strict=True):
            yield role, call, earned
