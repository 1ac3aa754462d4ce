"""A run whose roles are compared with their own earlier steps dies, is forked and is replayed."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from flows.replay import replay
from flows.runtime.forks import fork_run
from flows.train import train
from tasks.reports.verification import find_damage
from tasks.storage.run_folder import RunFolder, folder_of
from tasks.storage.tables import read_table
from tests.support.runs.two_policies import two_policies
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

pytestmark = pytest.mark.story

RECIPE = two_policies(
    steps=3,
    algorithm={"advantage": "running_mean", "advantage_settings": {"decay": 0.5}},
    checkpoints={"every": 3},
)
whole = fixture_of(RECIPE)


def test_the_listener_has_a_baseline_of_its_own(whole: RunFolder) -> None:
    """In the first step it earns 1 in each rollout; later, 1 in half of them."""
    advantages = [
        sorted({row["advantage"] for row in read_table(path).to_pylist()})
        for path in (whole.datums("listener", step) for step in range(3))
    ]
    # The baselines are 1, which leaves only failures to train on, and (0.5 × 1 + 0.5) / 1.5.
    assert advantages == [[], [-1.0], [pytest.approx(-2 / 3), pytest.approx(1 / 3)]]
    assert not [*find_damage(whole)]


@pytest.mark.parametrize(
    "killed", [dying_in_batch("train-00002.0"), dying_in_update(2)], ids=["batch", "update"]
)
def test_a_run_that_dies_continues_as_if_it_had_not(
    killed: AbstractContextManager[None], whole: RunFolder, tmp_path: Path
) -> None:
    assert differences(die_and_go_on(RECIPE, killed, tmp_path), whole) == []


def test_a_fork_and_a_replay_have_the_baselines_of_the_run(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    fork_run(whole, "fork", 2, RECIPE.model_dump(mode="json"), RECIPE.fingerprint())
    train(RECIPE, run="fork")
    replay(RECIPE, "whole", run="again")
    for name in ("fork", "again"):
        for policy in whole.policies():
            for step in range(3):
                path = folder_of(name).datums(policy, step)
                assert path.read_bytes() == whole.datums(policy, step).read_bytes(), path
    assert not list_faults(folder_of("fork"), read_contents(whole))
