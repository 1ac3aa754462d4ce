"""Values that an agent may return, read as rewards."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.rewards import (
    BETTER,
    Reward,
    RewardError,
    check_reward,
    check_roles,
    read_reward,
    reward_verdict,
)

numbers = st.floats(-1e6, 1e6)
returned = numbers | st.dictionaries(
    st.sampled_from(["policy", "guesser", "judge"]),
    numbers | st.lists(numbers, max_size=4),
    min_size=1,
)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, Reward(1.0)),
        ({"policy": 1, "guesser": 0}, Reward(1.0, {"policy": 1.0, "guesser": 0.0})),
        ({"asker": 1, "guesser": 0}, Reward(0.5, {"asker": 1.0, "guesser": 0.0})),
        ({"policy": [0.5, 0.25]}, Reward(0.75, {"policy": 0.75}, {"policy": (0.5, 0.25)})),
        ({"policy": (1,), "guesser": 2}, Reward(1, {"policy": 1, "guesser": 2}, {"policy": (1,)})),
        ({"policy": []}, Reward(0.0, {"policy": 0.0}, {"policy": ()})),
        ({}, Reward(None)),
        ({"asker": 1, "measure/a b.": 4}, Reward(1.0, {"asker": 1.0, "measure/a b.": 4.0})),
        ({"measure/unread": 1}, Reward(None, {"measure/unread": 1.0})),
    ],
)
def test_a_number_is_the_reward_of_all_roles_and_a_dict_of_each(value: Any, reward: Reward) -> None:
    assert read_reward(value) == reward


@pytest.mark.parametrize(
    "value",
    [
        "good",
        float("nan"),
        [1.0],
        {"policy": None},
        {"policy": [1, float("inf")]},
        {1: 2},
    ],
)
def test_a_value_that_is_not_a_reward_is_refused(value: Any) -> None:
    with pytest.raises(RewardError) as refused:
        read_reward(value)
    assert f"returned {value!r} as its reward; a finite number is needed" in str(refused.value)


@given(returned)
def test_a_reward_survives_json(value: Any) -> None:
    reward = read_reward(value)
    assert read_reward(json.loads(json.dumps(reward.to_json()))) == reward


def test_a_reward_for_an_unknown_role_is_refused() -> None:
    reward = read_reward({"policy": 1, "gueser": 1})
    with pytest.raises(RewardError, match="'gueser', and what it can reward is: policy, guesser"):
        check_roles(reward, {"policy": 1, "guesser": 1})


def test_rewards_of_calls_must_match_the_number_of_calls() -> None:
    reward = read_reward({"policy": [1, 0]})
    check_roles(reward, {"policy": 2})
    with pytest.raises(RewardError, match="2 rewards for the calls of the role 'policy', and 3"):
        check_roles(reward, {"policy": 3})


def test_measures_are_no_roles_and_have_no_calls() -> None:
    alone = read_reward({"measure/unread": 1})
    check_reward(alone)
    check_roles(alone, {"policy": 1})
    with pytest.raises(RewardError, match="2 rewards for the calls of the role 'measure/x', and 0"):
        check_roles(read_reward({"measure/x": [1, 0]}), {"policy": 2})


@pytest.mark.parametrize(
    ("verdict", "earned"),
    [
        ({"good": 1, "bad": -1, "measure/consistent": 1}, 1.0),
        ({"good": 0.2, "bad": 0.9}, 0.0),
        ({"good": 0, "bad": 0, "measure/consistent": 1}, 0.5),
        ({"good": 0.5, "bad": -0.5, "measure/consistent": 0}, 0.5),
        ({"good": [0.5, 0.25], "bad": [0.5, 0]}, 1.0),
        ({"good": 1, "measure/unread": 0}, None),
        ({}, None),
    ],
)
def test_a_judge_earns_the_pairs_of_which_it_prefers_the_better_one(
    verdict: Any, earned: float | None
) -> None:
    example = {"rollouts": [{"id": "bad"}, {"id": "good"}], BETTER: "good"}
    reward = reward_verdict(read_reward(verdict), example)
    assert reward.value == earned
    assert reward.roles["measure/abstained"] == (earned is None)
    assert {name: verdict[name] for name in verdict if "/" in name}.items() <= reward.roles.items()
    assert read_reward(reward.to_json()) == reward
