"""A run that dies under a loss by weights, several updates and a reference goes on to the bit."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

pytestmark = pytest.mark.story

STEPS = 4
RECIPE = small_recipe(
    steps=STEPS,
    algorithm={
        "advantage": "rebn",
        "discount": 0.9,
        "loss": "dual_clip",
        "loss_settings": {"dual_clip": 1.5},
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.1, "estimator": "k1"},
        "entropy_coefficient": 0.001,
    },
    optimizer={
        "learning_rate": 0.01,
        "substeps": 2,
        "epochs": 2,
        "schedule": "linear",
        "warmup_steps": 1,
    },
)
whole = fixture_of(RECIPE)


def test_every_step_trains_and_leaves_the_policy_that_sampled(whole: RunFolder) -> None:
    """The second minibatch of a step is not at ratio 1, which its log-probabilities show."""
    steps = read_metrics(whole.metrics)
    assert len(steps) == STEPS
    assert max(step["kl_sample_train_v2"] for step in steps) > 1e-7


def test_the_policy_leaves_its_reference(whole: RunFolder) -> None:
    divergence = [step["kl_reference_v2"] for step in read_metrics(whole.metrics)]
    assert divergence[0] < 1e-6 < divergence[-1], "the untrained LoRA is the reference"


@pytest.mark.parametrize(
    "killed",
    [dying_in_batch("train-00002.0"), dying_in_update(1), dying_in_update(2)],
    ids=["batch", "update", "next update"],
)
def test_a_run_that_dies_continues_as_if_it_had_not(
    killed: AbstractContextManager[None], whole: RunFolder, tmp_path: Path
) -> None:
    assert differences(die_and_go_on(RECIPE, killed, tmp_path), whole) == []
