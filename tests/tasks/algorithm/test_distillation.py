"""Distillation losses on a table of log-probabilities: values, derivatives and bounds."""

import numpy as np
import pytest

from ratchet.tasks.algorithm.distillation import DISTILLATIONS, NO_TOKEN, find_distillation

POSITIONS, VOCABULARY, K = 6, 12, 4
STEP = 1e-6


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def drawn(seed: int) -> np.ndarray:
    return 2 * np.random.default_rng(seed).normal(size=(POSITIONS, VOCABULARY))


LOGITS, TEACHER = drawn(0), log_softmax(drawn(1))
TOP = np.argsort(-TEACHER, axis=1)[:, :K]
LOG_Q = np.take_along_axis(TEACHER, TOP, 1)


def chosen(logits: np.ndarray) -> np.ndarray:
    return np.take_along_axis(log_softmax(logits), TOP, 1)


def of_tail(log_p: np.ndarray, log_q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two distributions with their tails as one token more, in logarithms."""
    whole = [np.concatenate([one, np.log1p(-np.exp(one).sum(-1, keepdims=True))], -1)
             for one in (log_p, log_q)]  # fmt: skip
    return whole[0], whole[1]


def by_definition(name: str, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Compute the divergence over tokens that are all there are."""
    first, second = (log_q, log_p) if name == "forward_kl" else (log_p, log_q)
    return (np.exp(first) * (first - second)).sum(-1)


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_a_loss_is_the_divergence_over_the_tokens_and_the_tail(name: str) -> None:
    log_p = chosen(LOGITS)
    loss, _ = DISTILLATIONS[name].function(log_p, LOG_Q)
    assert loss == pytest.approx(by_definition(name, *of_tail(log_p, LOG_Q)), abs=1e-12)


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_a_derivative_is_that_of_the_loss_by_each_log_probability(name: str) -> None:
    function, log_p = DISTILLATIONS[name].function, chosen(LOGITS)
    for place in np.ndindex(log_p.shape):
        moved = [log_p.copy(), log_p.copy()]
        moved[0][place] += STEP
        moved[1][place] -= STEP
        above, below = (function(one, LOG_Q)[0].sum() for one in moved)
        assert function(log_p, LOG_Q)[1][place] == pytest.approx(
            (above - below) / (2 * STEP), abs=1e-6
        )


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_a_cell_without_a_token_has_no_part_whatever_the_policy_gives_token_0(name: str) -> None:
    log_p = np.concatenate([chosen(LOGITS), np.full((POSITIONS, 1), -0.7)], 1)
    log_q = np.concatenate([LOG_Q, np.full((POSITIONS, 1), NO_TOKEN)], 1)
    loss, slope = DISTILLATIONS[name].function(log_p, log_q)
    expected, slopes = DISTILLATIONS[name].function(chosen(LOGITS), LOG_Q)
    assert loss.tolist() == expected.tolist()
    assert slope.tolist() == [[*row, 0.0] for row in slopes.tolist()]


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_tails_of_no_probability_leave_everything_finite(name: str) -> None:
    sure, unsure = np.log([[1.0, 1e-12]]), np.log([[0.5, 0.5]])
    for log_p, log_q in ((sure, unsure), (unsure, sure), (sure, sure)):
        loss, slope = DISTILLATIONS[name].function(log_p, log_q)
        assert np.isfinite([*loss, *slope.ravel()]).all()


def test_a_divergence_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no divergence 'jsd' \(there is: forward_kl"):
        find_distillation("jsd")
