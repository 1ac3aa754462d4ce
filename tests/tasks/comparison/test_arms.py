"""Arms of a sweep over seeds: means, intervals, paired differences, and the choice of one."""

import pytest

from ratchet.tasks.comparison.arms import find_arms
from ratchet.tasks.storage.plan_record import ChildResult


def result(arm: str, seed: int, measured: float | None) -> ChildResult:
    return ChildResult(f"{arm}{seed}", 2, measured=measured, arm=arm, seed=seed)


MEASURED = {"a": (0.0, 0.5, 1.0), "b": (0.25, 0.75, 1.25), "lucky": (2.0, None, None)}
RESULTS = [
    result(arm, seed, value) for arm, of in MEASURED.items() for seed, value in enumerate(of)
]
EXAMPLES = {
    one.run: {f"{number}": (one.measured + number / 8 - 0.25, 1.0) for number in range(5)}
    for one in RESULTS
    if one.measured is not None
}


def test_the_best_is_an_arm_and_no_seed_that_is_left_of_one_that_failed() -> None:
    arms = find_arms(RESULTS, EXAMPLES)
    assert [(arm.name, arm.seeds, arm.mean, arm.chosen) for arm in arms] == [
        ("a", 3, 0.5, False),
        ("b", 3, 0.75, True),
        ("lucky", 1, 2.0, False),
    ]
    lowest = find_arms(RESULTS, EXAMPLES, lowest=True)
    assert [arm.name for arm in lowest if arm.chosen] == ["a"]


def test_arms_that_differ_alike_in_each_seed_and_example_differ_more_surely_than_their_means() -> (
    None
):
    first, second, _ = find_arms(RESULTS, EXAMPLES)
    assert (first.difference, second.difference, second.paired) == (None, 0.25, True)
    assert first.interval is not None
    assert second.within is not None
    assert first.interval == pytest.approx((-0.765, 1.765), abs=0.03)  # t(2) = 4.30 of three seeds
    unpaired = find_arms(RESULTS, {})[1]
    assert (unpaired.difference, unpaired.within, unpaired.paired) == (None, None, False)


def test_a_seed_that_failed_in_one_arm_is_left_out_of_the_difference() -> None:
    left = [one for one in RESULTS if one.run not in ("a0", "b2")]
    _, second, _ = find_arms(left, EXAMPLES)
    assert second.difference == pytest.approx(0.25)
    assert second.seeds == 2


def test_two_seeds_tell_of_other_examples_alone() -> None:
    two = [one for one in RESULTS if one.seed != 2]
    spread = find_arms(two, EXAMPLES)[0].interval
    assert spread == pytest.approx((0.25 - 0.2454, 0.25 + 0.2454), abs=1e-3)
