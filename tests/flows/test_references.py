"""References: the base model, a checkpoint of another run, and models that cannot be one."""

from pathlib import Path

import numpy as np
import pytest

from ratchet.adapters.calls import POLICY
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import arrays, read_table
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die, die_and_go_on, differences, fixture_of, train_whole
from tests.support.servers.dying_engine import dying_in_update


def kept_near(reference: str, **changes: object) -> Recipe:
    divergence = {"coefficient": 0.1, "reference": reference}
    return small_recipe(algorithm={"kl": divergence}, **changes)


whole = fixture_of(kept_near("base"))


def test_the_base_model_gives_what_the_untrained_policy_sampled(whole: RunFolder) -> None:
    for step, apart in ((0, True), (1, False)):
        trajectories = read_table(whole.trajectories(POLICY, step))
        columns = arrays(trajectories["logprobs"]), arrays(trajectories["mask"])
        references = arrays(read_table(whole.references(POLICY, step))["logprobs"])
        differences = [
            np.abs(ours - theirs)[mask != 0].max()
            for ours, mask, theirs in zip(*columns, references, strict=True)
        ]
        assert (max(differences) < 1e-5) == apart


def test_a_tokens_advantage_is_less_by_its_penalty(whole: RunFolder) -> None:
    trajectories, datums = (
        read_table(whole.trajectories(POLICY, 1)),
        read_table(whole.datums(POLICY, 1)),
    )
    references = read_table(whole.references(POLICY, 1))
    names = trajectories["rollout_id"].to_pylist()
    for row in datums.to_pylist():
        place = names.index(row["rollout_id"])
        log_q, log_ref = (
            arrays(table["logprobs"])[place][1:] for table in (trajectories, references)
        )
        sampled = np.array(row["mask"]) != 0
        expected = row["advantage"] - 0.1 * (log_q - log_ref)[sampled]
        assert np.array(row["advantages"])[sampled] == pytest.approx(expected, abs=1e-6)


@pytest.mark.story
def test_a_penalty_in_the_loss_is_a_pass_of_its_own_which_a_run_that_dies_makes_again(
    prefect_server: None, no_tinker: None, tmp_path: Path
) -> None:
    recipe = small_recipe(
        algorithm={"kl": {"coefficient": 5.0, "estimator": "k3"}},
        optimizer={"learning_rate": 0.005, "substeps": 2},
    )
    with train_whole(recipe, tmp_path / "whole") as run:
        datums = read_table(run.datums(POLICY, 1))
        assert "references" in datums.column_names
        assert datums.num_rows == 16, "groups of equal rewards have the penalty too"
    broken = die_and_go_on(recipe, dying_in_update(1), tmp_path / "broken")
    assert differences(broken, run) == []


@pytest.mark.story
def test_a_checkpoint_of_another_run_stays_the_reference_when_that_run_is_gone(
    whole: RunFolder, tmp_path: Path
) -> None:
    recipe, root = kept_near("whole@2"), whole.path.parent
    broken = die(recipe, dying_in_update(1), root)
    first = read_table(broken.references(POLICY, 0))
    whole.path.rename(tmp_path / "moved")
    assert not (root / "whole").exists()
    train(recipe, run="broken")
    (tmp_path / "moved").rename(whole.path)
    assert read_table(broken.references(POLICY, 0)) == first
    divergence = [step["kl_reference_v2"] for step in read_metrics(broken.metrics)]
    assert divergence[0] > 1e-4, "the reference has been trained, and the policy has not"
