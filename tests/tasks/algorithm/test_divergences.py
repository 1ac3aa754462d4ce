"""KL estimators and penalties of tokens, by their definitions; numbers by hand."""

from collections.abc import Callable
from functools import partial
from math import exp, log
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.algorithm.divergences import ESTIMATORS
from ratchet.tasks.credit import penalties_of
from ratchet.tasks.scoring import REFERENCE_SCHEMA
from ratchet.tasks.settings.algorithm import Algorithm, Divergence, Teacher
from tests.support.credited import build, credited
from tests.support.trajectory_rows import table
from tests.tasks.test_credit import advantages, trajectory

DEFINITIONS = {
    "k1": lambda q, ref: q - ref,
    "k2": lambda q, ref: (q - ref) ** 2 / 2,
    "k3": lambda q, ref: exp(ref - q) - 1 - (ref - q),
    "low_var_kl": lambda q, ref: min(exp(ref - q) - 1 - (ref - q), 10),
    "abs": lambda q, ref: abs(q - ref),
    "jsd": lambda q, ref: -log((1 + exp(ref - q)) / 2) / 2,
}
KL = {"coefficient": 0.1}
LOG_PROBABILITY = st.floats(-8, 0)


@pytest.mark.parametrize("name", DEFINITIONS)
@given(q=LOG_PROBABILITY, ref=LOG_PROBABILITY)
def test_an_estimator_follows_its_definition(name: str, q: float, ref: float) -> None:
    estimate = ESTIMATORS[name].estimate(np.array([ref - q]), 0.5)
    assert estimate[0] == pytest.approx(DEFINITIONS[name](q, ref), rel=1e-6, abs=1e-6)


def test_every_estimator_has_a_definition() -> None:
    assert DEFINITIONS.keys() == ESTIMATORS.keys()


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def jensen_shannon(q: np.ndarray, t: np.ndarray, beta: float) -> float:
    mixture = beta * t + (1 - beta) * q
    return beta * kl(t, mixture) + (1 - beta) * kl(q, mixture)


def policy_gradient(q: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Return the expected gradient of A log q by the logits, over all tokens."""
    return q * (advantages - (q * advantages).sum())


SLOPE = 1e-5


@pytest.mark.parametrize("name", [name for name, row in ESTIMATORS.items() if row.slope])
def test_a_slope_is_the_derivative_of_the_estimate(name: str) -> None:
    """Both bounds of low_var_kl are passed: its estimate is 10 where d is about 2.5."""
    row, d = ESTIMATORS[name], np.array([-25.0, -21.0, -12.0, -8.0, -1.0, 0.5, 2.0, 2.6, 4.0])
    apart = (row.estimate(d - SLOPE, 0.5) - row.estimate(d + SLOPE, 0.5)) / (2 * SLOPE)
    assert row.slope is not None
    assert row.slope(d) == pytest.approx(apart, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_place_of_a_penalty_is_one_of_its_estimator_unless_it_is_given(name: str) -> None:
    places = ESTIMATORS[name].placements
    made = Divergence.model_validate({"coefficient": 0.1, "estimator": name})
    assert made.placement == places[0]
    assert made.in_loss == (places[0] == "loss")


@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize(
    ("settings", "divergence"),
    [({"divergence": "reverse_kl"}, kl)]
    + [
        ({"divergence": "jsd", "beta": beta}, partial(jensen_shannon, beta=beta))
        for beta in (0.2, 0.5, 0.9)
    ],
)
def test_a_teachers_term_has_the_gradient_of_its_divergence(
    settings: dict, divergence: Callable[[np.ndarray, np.ndarray], float], seed: int
) -> None:
    """The gradient is measured by differences of the logits of five tokens."""
    logits, of_teacher = np.random.default_rng(seed).normal(0, 1.5, (2, 5))
    q, t = softmax(logits), softmax(of_teacher)
    penalty = Teacher.model_validate({"models": ["run@1"], "coefficient": 1, **settings})
    term = -penalties_of(penalty, np.log(q), np.log(t), np.ones(5))
    steps = SLOPE * np.eye(5)
    measured = [
        (divergence(softmax(logits + s), t) - divergence(softmax(logits - s), t)) / (2 * SLOPE)
        for s in steps
    ]
    assert policy_gradient(q, term) == pytest.approx(-np.array(measured), abs=1e-6)


def test_a_penalty_is_of_sampled_tokens_alone() -> None:
    log_q, mask = np.zeros(4), np.array([0, 1, 1, 1])
    of_reference = np.array([-9.0, -1.0, -2.0, -3.0])
    of_tokens = penalties_of(Divergence(coefficient=0.5), log_q, of_reference, mask)
    assert of_tokens.tolist() == [0.0, 0.5, 1.0, 1.5]


def references(*rows: dict, logprobs: list[float]) -> dict[str, pa.Table]:
    names = REFERENCE_SCHEMA.names[:-1]
    made = [{n: row[n] for n in names} | {"logprobs": logprobs} for row in rows]
    return {"references": pa.Table.from_pylist(made, schema=REFERENCE_SCHEMA)}


def test_a_penalty_lessens_the_advantage_of_each_token() -> None:
    """Sampled tokens have log q = -1; the reference gives -1.5 and -1, so k1 is 0.5 and 0."""
    rows = trajectory(0, 1.0, [None]), trajectory(1, 0.0, [None])
    of_reference = references(*rows, logprobs=[0.0, -1.5, -1.0])
    credit = credited("centred", kl=KL)
    datums = build(table(*rows), credit, of_reference)
    assert advantages(datums) == [pytest.approx([0.45, 0.5]), pytest.approx([-0.55, -0.5])]
    assert datums["advantage"].to_pylist() == [0.5, -0.5], "it is what the comparison gave"


def test_a_reference_and_a_teacher_have_a_term_each() -> None:
    """k1 of the reference is 0.5 and 0; the teacher gives each token 0.25 more than the policy."""
    rows = trajectory(0, 1.0, [None]), trajectory(1, 0.0, [None])
    scored = references(*rows, logprobs=[0.0, -1.5, -1.0])
    scored["teachers"] = references(*rows, logprobs=[0.0, -0.75, -0.75])["references"]
    credit = credited("centred", kl=KL, teacher={"models": ["run@1"]})
    datums = build(table(*rows), credit, scored)
    assert advantages(datums) == [pytest.approx([0.7, 0.75]), pytest.approx([-0.3, -0.25])]


def test_a_penalty_in_the_reward_is_compared_with_the_group_s() -> None:
    """Both are equally far from the reference, so only the rewards differ, and none moves."""
    rows = trajectory(0, 1.0, [None]), trajectory(1, 0.0, [None])
    of_reference = references(*rows, logprobs=[0.0, -1.5, -1.0])
    credit = credited("centred", kl={**KL, "placement": "reward"})
    datums = build(table(*rows), credit, of_reference)
    assert advantages(datums) == [pytest.approx([0.5, 0.5]), pytest.approx([-0.5, -0.5])]


def test_a_penalty_in_the_loss_gives_every_datum_its_references() -> None:
    """The rewards are equal, so that the comparison alone would train neither."""
    rows = trajectory(0, 1.0, [None]), trajectory(1, 1.0, [None])
    of_reference = references(*rows, logprobs=[0.0, -1.5, -1.0])
    credit = credited("centred", kl={**KL, "estimator": "k3"})
    made = build(table(*rows), credit, of_reference)
    assert made["references"].to_pylist() == [[-1.5, -1.0]] * 2
    assert advantages(made) == [[0.0, 0.0]] * 2


def test_reinforce_plus_plus_whitens_the_returns_of_tokens() -> None:
    """The returns are 1 - 0.05, 1, -0.05 and 0: the first token of each answer costs 0.05."""
    rows = trajectory(0, 1.0, [None]), trajectory(1, 0.0, [None])
    of_reference = references(*rows, logprobs=[0.0, -1.5, -1.0])
    credit = credited("reinforce_plus_plus", kl={**KL, "placement": "reward"})
    returns = np.array([0.95, 1.0, -0.05, 0.0])
    whitened = (returns - returns.mean()) / returns.std(ddof=1)
    made = np.concatenate(advantages(build(table(*rows), credit, of_reference)))
    assert made == pytest.approx(whitened, abs=1e-6)


def test_what_all_rollouts_earn_alike_trains_by_the_terms_of_its_tokens_alone() -> None:
    rows = trajectory(0, 1.0, [None]), trajectory(1, 1.0, [None])
    assert build(table(*rows), credited("centred")).num_rows == 0
    bonus = credited("centred", entropy_coefficient=0.01)
    assert advantages(build(table(*rows), bonus)) == [pytest.approx([0.01, 0.01])] * 2


@pytest.mark.parametrize(
    "term",
    [
        {"kl": {"coefficient": 0.1}},
        {"entropy_coefficient": 0.1},
        {"teacher": {"models": ("run@3",)}},
    ],
)
def test_a_loss_in_which_a_term_of_the_advantage_has_another_gradient_refuses_it(
    term: dict[str, Any],
) -> None:
    by_advantage = {"loss": "rec", "loss_settings": {"weight": "advantage"}}
    for of_loss in ({"loss": "dft"}, {"loss": "phi"}, by_advantage):
        with pytest.raises(
            ValueError, match=f"{next(iter(term))}.* has not its own gradient; give"
        ):
            Algorithm.model_validate({**of_loss, **term})
    Algorithm.model_validate({"loss": "dft", "kl": {"coefficient": 0.1, "estimator": "k2"}})
    Algorithm.model_validate({"loss": "opmd", **term})


def test_references_of_other_trajectories_are_refused() -> None:
    rows = trajectory(0, 1.0, [None]), trajectory(1, 0.0, [None])
    credit = credited("centred", kl=KL)
    with pytest.raises(ValueError, match="belong to other trajectories"):
        build(table(*rows), credit, references(rows[0], logprobs=[0.0, -1.5, -1.0]))
    with pytest.raises(ValueError, match="needs the references"):
        build(table(*rows), credit)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"estimator": "k2"}, "placement loss do nothing without"),
        ({"reference": "sft@3"}, "reference does nothing without coefficient"),
        ({"coefficient": 0.1, "estimator": "k4"}, "no KL estimator 'k4'"),
        *(
            (
                {"coefficient": 0.1, "estimator": name, "placement": place},
                f"{place}.*give k1, {name}",
            )
            for name in ("k2", "k3", "low_var_kl", "abs")
            for place in ("advantage", "reward")
        ),
        ({"coefficient": 0.1, "estimator": "jsd", "placement": "reward"}, "reward.*give k1, jsd"),
        ({"coefficient": 0.1, "estimator": "k1", "placement": "loss"}, "in the loss.*give k2"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Divergence.model_validate(settings)
