"""Groups as a judge of pairs is shown them, and what its rollouts are said to end with."""

from collections import Counter
from datetime import UTC, datetime
from itertools import combinations
from typing import Any, cast

import pytest

from adapters.player_protocol import RolloutEnd
from adapters.rewards import read_reward
from tasks.judging.groups import Judging
from tasks.recording.recorded_rollouts import describe_end
from tasks.recording.spans import end_spans, scored_names


def opponents_of_each(count: int, opponents: int) -> list[int]:
    """Return with how many others each of `count` rollouts is shown."""
    rollouts = cast(list[Any], [*range(count)])
    pairs = [*Judging("pair", {}, opponents).sets(rollouts)]
    assert len({frozenset(pair) for pair in pairs}) == len(pairs), "no pair is shown twice"
    shown = Counter(one for pair in pairs for one in pair)
    return [shown[one] for one in rollouts]


@pytest.mark.parametrize("opponents", range(1, 9))
@pytest.mark.parametrize("count", range(2, 10))
def test_each_rollout_is_shown_with_so_many_others(count: int, opponents: int) -> None:
    asked = min(opponents, count - 1)
    more = int(count % 2 == 1 and asked % 2 == 1)  # their number times that of opponents is even
    assert sorted(opponents_of_each(count, opponents)) == [asked] * (count - more) + (
        [asked + 1] * more
    )


def test_without_a_number_each_pair_is_shown() -> None:
    rollouts = cast(list[Any], [*range(5)])
    assert [*Judging("pair", {}).sets(rollouts)] == [*combinations(rollouts, 2)]


def test_an_even_number_of_opponents_are_the_neighbours_in_a_circle() -> None:
    rollouts = cast(list[Any], [*range(6)])
    pairs = [*Judging("pair", {}, 2).sets(rollouts)]
    assert pairs == [(0, 1), (0, 5), (1, 2), (2, 3), (3, 4), (4, 5)]


A, B = "train-00000-0000-00", "train-00000-0000-01"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({B: -1, A: 1, "measure/consistent": 1}, f"scores {A} 1, {B} -1; measured consistent 1"),
        ({A: [0.5, 0.25], B: -0.0}, f"scores {A} 0.75 (0.5 + 0.25), {B} 0"),
        ({"measure/unread": 1}, "no scores; measured unread 1"),
        (0.5, "no scores"),
        ({"other": 1}, "RewardError: the agent returned a reward for 'other', and what it can"),
    ],
)
def test_the_rollout_of_a_judge_has_ended_with_its_verdict(returned: object, said: str) -> None:
    now, reward = datetime.now(UTC), read_reward(returned)
    calls = scored_names([A, B], reward)
    end = RolloutEnd(reward, 0.0, "judge-00000-0000-00", calls=calls)
    described = describe_end(end_spans(end, now))
    assert described.startswith(said)
    assert described == said or "RewardError" in said
