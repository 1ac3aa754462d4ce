"""Values that an agent may return, read as rewards."""

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.rewards import (
    BETTER,
    Reward,
    RewardError,
    check_reward,
    check_roles,
    read_reward,
    reward_verdict,
)

numbers = st.floats(-1e5, 1e5)
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
        (
            {"policy": -1e6, "measure/bytes": 1e9},
            Reward(-1e6, {"policy": -1e6, "measure/bytes": 1e9}),
        ),
    ],
)
def test_a_number_is_the_reward_of_all_roles_and_a_dict_of_each(value: Any, reward: Reward) -> None:
    assert read_reward(value) == reward


ONE = {
    "a bool of numpy": np.bool_(True),
    "a half": np.float16(1),
    "a long double": np.longdouble(1),
    "an int": np.int64(1),
    "no dimension": np.array(1.0),
    "three dimensions": np.array([[[1.0]]]),
    "a masked array without a mask": np.ma.array([1.0]),
    "a tensor": torch.tensor(1.0),
    "a tensor with a gradient": torch.ones(1, 1, requires_grad=True),
    "bfloat16": torch.ones((), dtype=torch.bfloat16),
    "a decimal": Decimal(1),
    "a fraction": Fraction(2, 2),
    "a scalar of Arrow": pa.scalar(1.0),
}
NONE = {
    "several": np.array([1.0, 2.0]),
    "several of one role": {"policy": np.array([1.0, 2.0])},
    "no element": np.array([]),
    "a masked element": np.ma.masked,
    "a masked array": np.ma.array([1.0], mask=[True]),
    "a text": np.array("1"),
    "a text alone": np.str_("1"),
    "a complex number": np.complex64(1),
    "an array of one": np.array(1 + 0j),
    "several of torch": torch.ones(2),
    "a tensor without data": torch.ones((), device="meta"),
    "no number of torch": torch.tensor(float("nan")),
    "no number": Decimal("sNaN"),
    "a number beyond floats": Decimal("1e999"),
    "a fraction beyond floats": Fraction(10**400),
    "a number of no role": {1: [2]},
    "a text of Python": "good",
    "a list": [1.0],
    "an infinite part": {"policy": [1, float("inf")]},
    "a reward beyond a million": -1.1e6,
    "parts beyond a million together": {"policy": [6e5, 6e5]},
    "parts beyond a million that sum to 0": {"policy": [1e308, -1e308]},
}


@pytest.mark.parametrize("value", ONE.values(), ids=ONE)
def test_a_real_number_of_any_library_is_a_reward_a_measure_and_a_part(value: Any) -> None:
    assert read_reward(value) == Reward(1.0)
    assert read_reward({"measure/x": value}) == Reward(None, {"measure/x": 1.0})
    parts = read_reward({"policy": [value, 1]})
    assert parts == Reward(2.0, {"policy": 2.0}, {"policy": (1.0, 1.0)})
    assert json.dumps(parts.to_json()) == '{"policy": [1.0, 1.0]}'


@pytest.mark.parametrize("value", NONE.values(), ids=NONE)
def test_what_is_not_one_finite_real_number_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(RewardError, match="as its reward; a finite number is needed") as refused:
        read_reward(value)
    assert len(str(refused.value)) < 500


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
