"""Self-play: one policy on both sides, measured or trained against a fixed opponent."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.binding import read_bound
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.debug import debug_rollout
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import policy_version
from ratchet.tasks.recording.spans import LLM, REWARD
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch

BASE = "checkpoint:base"
PLAYED = {"examples": 4, "every": 3, "roles": {"opponent": BASE}}


def duel(**changes: Any) -> Recipe:
    values = {"agent": "duel", "roles": {"opponent": POLICY}, "evaluation": PLAYED, "steps": 3}
    return small_recipe(**values | changes)


@pytest.fixture(scope="module")
def played(root: Path, prefect_server: None, no_tinker: None) -> RunFolder:
    train(duel(), run="played")
    return folder_of("played")


def answered(run: RunFolder, batch: str) -> set[tuple[str, str]]:
    """List who has answered which role in a batch."""
    rows = read_table(run.spans(batch)).to_pylist()
    return {(row["role"], row["policy_version"]) for row in rows if row["kind"] == LLM}


def test_one_policy_plays_and_trains_both_sides_whose_rewards_cancel(played: RunFolder) -> None:
    [version] = {who for _, who in answered(played, "train-00001.0")}
    assert answered(played, "train-00001.0") == {("policy", version), ("opponent", version)}
    rewards = read_table(played.rewards(POLICY, 1)).to_pylist()
    by_rollout: dict[str, list[float]] = {}
    for row in rewards:
        by_rollout.setdefault(row["rollout_id"], []).append(row["reward"])
    assert len(by_rollout) == 16
    assert all(len(both) == 2 and sum(both) == 0 for both in by_rollout.values())


def test_held_out_examples_are_played_against_the_fixed_opponent(played: RunFolder) -> None:
    for step in (0, 3):
        found = dict(answered(played, f"test-{step:05d}.0"))
        assert found["opponent"] == BASE
        assert found["policy"] != BASE


@pytest.mark.story
def test_a_checkpoint_that_answers_a_role_is_bound_and_never_trained(played: RunFolder) -> None:
    against = "checkpoint:played@3"
    train(duel(steps=1, roles={"opponent": against}, evaluation={"examples": 4}), run="against")
    run = folder_of("against")
    assert read_bound(run, "played@3").step == 3
    assert ("opponent", against) in answered(run, "train-00000.0")
    assert ("opponent", against) in answered(run, "test-00001.0")
    roles = {row["role"] for row in read_table(run.rewards(POLICY, 0)).to_pylist()}
    assert roles == {"policy"}
    masks = read_table(run.trajectories(POLICY, 0), ["role", "mask"]).to_pylist()
    assert {row["role"] for row in masks if sum(row["mask"])} == {"policy"}
    ends = [
        row for row in read_table(run.spans("train-00000.0")).to_pylist() if row["kind"] == REWARD
    ]
    assert len(ends) == 16


EARLIER = duel(steps=5, roles={"opponent": "earlier:2"}, evaluation={"examples": 2})
renewed = fixture_of(EARLIER)


@pytest.mark.story
def test_an_opponent_is_renewed_every_few_steps_and_never_trained(renewed: RunFolder) -> None:
    sampled = dict.fromkeys(range(5), 0) | {2: 2, 3: 2, 4: 4}
    for step, opponent in sampled.items():
        own = policy_version(POLICY, step)
        against = ("opponent", f"earlier:2@{opponent:05d}")
        assert answered(renewed, f"train-{step:05d}.0") == {("policy", own), against}
        masks = read_table(renewed.trajectories(POLICY, step), ["role", "mask"]).to_pylist()
        assert {row["role"] for row in masks if sum(row["mask"])} == {"policy"}
    assert ("opponent", "earlier:2@00004") in answered(renewed, "test-00005.0")


@pytest.mark.story
def test_a_run_that_dies_plays_against_the_same_opponents(
    renewed: RunFolder, tmp_path: Path
) -> None:
    broken = die_and_go_on(EARLIER, dying_in_batch("train-00003.0"), tmp_path)
    assert differences(broken, renewed) == []


@pytest.mark.story
def test_a_fork_goes_on_against_the_opponents_of_its_parent(
    renewed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(renewed.path.parent))
    fork_run(renewed, "forked", 3, EARLIER.model_dump(mode="json"), EARLIER.fingerprint())
    train(EARLIER, run="forked")
    forked = folder_of("forked")
    assert ("opponent", "earlier:2@00002") in answered(forked, "train-00003.0")
    assert read_table(forked.datums(POLICY, 4)).equals(read_table(renewed.datums(POLICY, 4)))


@pytest.mark.story
def test_a_rollout_against_an_earlier_checkpoint_can_be_debugged(renewed: RunFolder) -> None:
    rerun = debug_rollout(renewed, "train-00003-0001-00", sample=True, stop=False)
    assert rerun.lines()["now"] == "the same"


def test_a_step_s_opponent_is_drawn_from_a_pool_by_the_seed() -> None:
    recipe = duel(roles={"opponent": "pool:3"})
    drawn = [recipe.earlier(step)["pool:3"] for step in range(200)]
    assert drawn == [recipe.earlier(step)["pool:3"] for step in range(200)]
    assert all(opponent % 3 == 0 and opponent <= step for step, opponent in enumerate(drawn))
    assert min(drawn[150:]) < 30
    assert max(drawn[150:]) > 150
    assert drawn != [duel(roles=recipe.roles, seed=1).earlier(s)["pool:3"] for s in range(200)]


def test_a_role_of_a_checkpoint_that_is_not_there_is_refused(root: Path, no_tinker: None) -> None:
    with pytest.raises(UserError, match=r"roles.opponent none@3 names no run"):
        train(duel(roles={"opponent": "checkpoint:none@3"}, evaluation={}), run="none")
    assert not folder_of("none").path.exists()


@pytest.mark.parametrize(
    ("roles", "held_out"),
    [
        ({"opponent": "function:hello:compare"}, {"opponent": BASE}),
        ({"opponent": POLICY}, {"other": BASE}),
        ({"opponent": POLICY}, {"opponent": "openai/gpt-4o"}),
    ],
)
def test_only_a_role_of_a_policy_has_a_fixed_opponent(
    roles: dict[str, str], held_out: dict[str, str]
) -> None:
    with pytest.raises(
        ValueError, match=r"evaluation\.roles\.\w+ .*: a role that a policy answers"
    ):
        duel(roles=roles, evaluation={"roles": held_out})
