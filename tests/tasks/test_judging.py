"""Groups as a judge of pairs is shown them: each rollout with so many others."""

from collections import Counter
from itertools import combinations
from typing import Any, cast

import pytest

from tasks.judging.groups import Judging


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
