"""KL penalties through the engine, beside the gradient of the divergence over all tokens."""

from collections.abc import Iterator

import pytest

from benchmarks.peers.gradients import (
    BASE,
    Step,
    advantage_term,
    compare_placements,
    entropy_term,
    make_step,
)
from ratchet.adapters.tinker.service import connect
from ratchet.tasks.algorithm.divergences import ESTIMATORS
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES, advantage_factor


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Step]:
    with connect(BASE, tmp_path_factory.mktemp("state")) as service:
        yield make_step(service, places=2, likeliest=20)


@pytest.mark.story
def test_an_estimator_has_a_divergence_s_gradient_where_it_is_admitted_and_nowhere_else(
    step: Step,
) -> None:
    """k1 and k2 have that of KL(p, ref), whose tokens of small probability are left out here."""
    for name, place, beside in compare_placements(step):
        if place in ESTIMATORS[name].placements:
            assert beside.cosine > 0.6, (name, place, beside)
            if name in ("k1", "k2"):
                assert 0.8 < beside.norm < 1.1, (name, place, beside)
                assert beside.cosine > 0.98, (name, place, beside)
        elif name != "jsd":
            assert beside.cosine < 0.5, (name, place, beside)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        *((name, {}) for name in TOKEN_LOSSES),
        ("rec", {"weight": "advantage"}),
        ("opmd", {"tau": 3.0}),
    ],
)
def test_a_loss_multiplies_an_advantage_by_the_factor_that_k1_has_there(
    step: Step, loss: str, settings: dict
) -> None:
    beside = step.compare(advantage_term(step, loss, settings), step.divergence)
    plain = step.compare(advantage_term(step, "importance_sampling", {}), step.divergence)
    factor = advantage_factor(loss, settings)
    if factor:
        assert beside.norm == pytest.approx(factor * plain.norm, rel=1e-3)
        assert beside.cosine == pytest.approx(plain.cosine, abs=1e-3)
    else:
        assert abs(beside.norm / plain.norm - 1) > 0.1


def test_an_entropy_bonus_has_the_gradient_of_the_entropy(step: Step) -> None:
    beside = step.compare(entropy_term(step), step.entropy)
    assert 0.6 < beside.norm < 1.1
    assert beside.cosine > 0.9
