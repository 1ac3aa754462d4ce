"""Our formulas beside the peers' own code: they agree, or it is told and tested why they do not."""

from math import exp, inf, log
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.formulas import AGREE, PEERS, STEPS, TRAJECTORIES, Compared, compare
from benchmarks.peers.ours import compute_advantages
from benchmarks.peers.pairs import ADVANTAGES, DIVERGENCES, LOSSES, PREFERENCES
from ratchet.tasks.algorithm import advantages, divergences, losses, preferences

EVERY_PAIR = (*LOSSES, *ADVANTAGES, *DIVERGENCES, *PREFERENCES)


def compared_with(peer: str) -> list[Compared]:
    if not PEERS[peer].python.exists():
        pytest.skip(f"{peer} is not installed: there is no {PEERS[peer].python}; run `make peers`")
    return compare(peer)


@pytest.fixture(scope="module")
def trinity() -> list[Compared]:
    return compared_with("trinity")


@pytest.fixture(scope="module")
def trl() -> list[Compared]:
    return compared_with("trl")


@pytest.fixture(scope="module")
def cookbook() -> list[Compared]:
    return compared_with("cookbook")


def find(compared: list[Compared], differs: str) -> Compared:
    """Return the one comparison whose difference is told by these words."""
    (found,) = [of for of in compared if differs in of.pair.differs]
    return found


def test_every_row_is_compared_but_those_that_no_peer_has() -> None:
    compared = {pair.ours for pair in EVERY_PAIR}
    rows = {*losses.TOKEN_LOSSES, *advantages.ADVANTAGES, *divergences.ESTIMATORS}
    rows |= {*preferences.PREFERENCES}
    assert rows - compared == {"dro", "maxrl", "rebn", "zero", "jsd"}


def test_the_docs_tell_every_difference() -> None:
    said = Path("docs/algorithms.md").read_text(encoding="utf-8")
    assert [pair.differs for pair in EVERY_PAIR if f" {pair.differs} |" not in said] == []


@pytest.mark.parametrize("peer", PEERS)
def test_formulas_agree_unless_a_difference_is_told(
    peer: str, request: pytest.FixtureRequest
) -> None:
    for of in request.getfixturevalue(peer):
        apart = max(of.differences.values(), default=inf)
        assert (apart > AGREE) == bool(of.pair.differs), of.pair


def test_trinity_s_sapo_has_the_gate_as_its_gradient(trinity: list[Compared]) -> None:
    of = find(trinity, "detaches the gate")
    for tokens, gradients in zip(TRAJECTORIES, of.answer["gradients"], strict=True):
        for place, a in enumerate(tokens["advantages"]):
            ratio = exp(tokens["logprobs"][place] - tokens["sampling_logprobs"][place])
            tau = 1.0 if a > 0 else 1.05
            gate = 4 / tau / (1 + exp(-tau * (ratio - 1)))
            assert gradients[place] == pytest.approx(-gate * a, abs=AGREE)


def test_trinity_s_sppo_has_no_loss_where_the_ratio_is_clipped(trinity: list[Compared]) -> None:
    of = find(trinity, "has the loss 0")
    assert of.differences["gradient"] < AGREE
    for tokens, theirs in zip(TRAJECTORIES, of.answer["losses"], strict=True):
        apart = np.subtract(tokens["logprobs"], tokens["sampling_logprobs"])
        inside = np.abs(apart) <= log(1.3)
        loss = -(apart * inside) @ np.array(tokens["advantages"])
        assert theirs == pytest.approx(loss, abs=AGREE)


def test_trinity_gives_equal_rewards_an_advantage(trinity: list[Compared]) -> None:
    of = find(trinity, "rounds the mean of equal rewards")
    assert compute_advantages("standardized", {}, STEPS["uniform"]) == [0.0] * 16
    eight_of_a_tenth, eight_of_seven_tenths = of.answer["values"][:8], of.answer["values"][8:]
    for equal in (eight_of_a_tenth, eight_of_seven_tenths):
        assert len(set(equal)) == 1
        assert abs(equal[0]) > 1e-3


def test_trinity_gives_a_rollout_without_others_its_reward(trinity: list[Compared]) -> None:
    rewards = [call["reward"] for call in STEPS["alone"]]
    alone = [of for of in trinity if "a rollout without others gets its rew" in of.pair.differs]
    assert {of.pair.ours for of in alone} == {"standardized", "leave_one_out", "opmd", "asymre"}
    for of in alone:
        assert of.answer["values"] == pytest.approx(rewards, rel=1e-5)


def test_trinity_compares_raw_rewards_with_the_mean_of_penalized_ones(
    trinity: list[Compared],
) -> None:
    theirs = iter(find(trinity, "mean of the penalized").answer["values"])
    for task in (0, 1):
        group = [call for call in STEPS["ranked"] if call["task"] == task]
        penalized = [call["call_reward"] for call in group]
        for call in group:
            expected = (call["reward"] - np.mean(penalized)) / np.std(penalized, ddof=1)
            assert next(theirs) == pytest.approx(expected, abs=1e-5)


def test_trinity_s_rec_divides_by_the_biased_deviation(trinity: list[Compared]) -> None:
    theirs = find(trinity, "biased").answer["values"]
    ours = compute_advantages("standardized", {}, STEPS["groups"])
    tasks = [call["task"] for call in STEPS["groups"]]
    sizes = np.array([tasks.count(task) for task in tasks])
    assert theirs == pytest.approx(ours * np.sqrt(sizes / (sizes - 1)), abs=1e-5)


def test_trinity_s_gigpo_compares_calls_of_different_tasks(trinity: list[Compared]) -> None:
    theirs = np.array(find(trinity, "calls of all tasks").answer["values"])
    calls = STEPS["shared"]
    whole = np.array(compute_advantages("gigpo", {"omega": 0.0}, calls))
    returns = np.array(compute_advantages("none", {}, calls))
    states = np.array([call["state"] for call in calls])
    means = np.array([returns[states == state].mean() for state in states])
    assert theirs == pytest.approx(whole + returns - means, abs=AGREE)
