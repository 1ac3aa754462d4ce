"""Groups as a judge of pairs is shown them, and what its rollouts are said to end with."""

from datetime import UTC, datetime
from itertools import combinations
from typing import Any, cast

import pytest

from ratchet.adapters.player_protocol import RolloutEnd
from ratchet.adapters.rewards import read_reward
from ratchet.tasks.judging import shown_sets
from ratchet.tasks.recording.recorded_rollouts import describe_end
from ratchet.tasks.recording.spans import end_spans, scored_names
from ratchet.tasks.settings.rollouts import Judge


def test_each_pair_of_a_group_is_shown() -> None:
    rollouts = cast(list[Any], [*range(5)])
    assert [*shown_sets(Judge(agent="judge:pairs"), rollouts)] == [*combinations(rollouts, 2)]


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
