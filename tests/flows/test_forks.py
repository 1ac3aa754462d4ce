"""Forks and replays: what lies before a step is shared, and the same settings give the same run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.batches import OpenBatch
from ratchet.flows.checkpoints.forks import fork_run, replay_run
from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.train import train
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.facts import describe_origin
from ratchet.tasks.rollouts import Play, RolloutHost
from ratchet.tasks.storage.manifest import lineage
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from tests.flows.test_train import final_weights, without_clocks
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import small_recipe

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")

RECIPE = small_recipe(steps=3, checkpoints={"every": 2})


@pytest.fixture(scope="module")
def parent(root: Path, recorded_run: RecordedRun) -> RunFolder:
    return recorded_run(RECIPE, "parent")


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the batches that are sampled from now on."""
    batches, play = [], RolloutHost.play

    def collect_names(server: RolloutHost, batch: OpenBatch, how: Play) -> None:
        batches.append(batch.name)
        play(server, batch, how)

    monkeypatch.setattr(RolloutHost, "play", collect_names)
    return batches


def fork(parent: RunFolder, name: str, step: int, recipe: Recipe = RECIPE) -> RunFolder:
    return fork_run(parent, name, step, recipe.model_dump(mode="json"), recipe.fingerprint())


def score_of(run: RunFolder, checkpoint: int) -> float:
    mean = read_evaluation(run.evaluation(f"{checkpoint:05d}"))["sampled"].finished.mean
    assert mean is not None
    return mean


def inodes(run: RunFolder, pattern: str) -> dict[str, int]:
    files = run.path.glob(pattern)
    return {str(path.relative_to(run.path)): path.stat().st_ino for path in files}


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.story)])
def test_a_fork_with_unchanged_settings_is_its_parent_bit_for_bit(
    parent: RunFolder, sampled: list[str], step: int
) -> None:
    copy = fork(parent, f"same-{step}", step)
    train(RECIPE, run=copy.name)
    assert final_weights(copy.path) == final_weights(parent.path)
    assert without_clocks(copy.path) == without_clocks(parent.path)
    for later in (1, 2):
        ours, theirs = copy.datums(POLICY, later), parent.datums(POLICY, later)
        assert ours.read_bytes() == theirs.read_bytes()
    trained = [batch for batch in sampled if batch.startswith("train-")]
    assert trained == [f"train-{later:05d}.0" for later in range(step, 3)]


def test_a_fork_shares_the_files_before_its_step_and_copies_none(parent: RunFolder) -> None:
    copy = fork(parent, "shares", 2)
    ours, theirs = inodes(copy, "*/*.*"), inodes(parent, "*/*.*")
    assert {
        "spans/train-00001.0.parquet",
        "journal/train-00001.0.jsonl",
        "datums/00001.parquet",
    } <= (ours.keys())
    assert {name for name in ours if "-00002." in name or name.endswith("/00002.parquet")} == set()
    assert all(inode == theirs[name] for name, inode in ours.items())
    tensors = inodes(copy, "engine/tensors/**/*.safetensors")
    assert tensors
    assert tensors.items() <= inodes(parent, "engine/tensors/**/*.safetensors").items()
    assert [row["step"] for row in read_metrics(copy.metrics)] == [0, 1]


def test_a_fork_says_whose_it_is(parent: RunFolder) -> None:
    recipe = small_recipe(steps=3, checkpoints={"every": 2}, optimizer={"learning_rate": 0.1})
    copy = fork(parent, "named", 1, recipe)
    said = json.loads(copy.manifest.read_text())["parent"]
    assert (said["run"], said["step"], said["fingerprint"]) == ("parent", 1, RECIPE.fingerprint())
    assert [step for step, _ in lineage(copy)] == [0, 1]
    rates = [made["optimizer"]["learning_rate"] for _, made in lineage(copy)]
    assert rates == [0.005, 0.1]


@pytest.mark.story
def test_what_lies_before_a_fork_stays_the_parents_under_other_settings(parent: RunFolder) -> None:
    recipe = small_recipe(steps=2, optimizer={"learning_rate": 0.05}, checkpoints={"every": 2})
    copy = fork(parent, "faster", 1, recipe)  # checkpoint 1 has no saved state: it is rebuilt
    train(recipe, run="faster")
    first, second = without_clocks(copy.path)
    assert [first, second] == without_clocks(parent.path)[
        :2
    ]  # the second step's policy is the parent's
    ours, theirs = copy.datums(POLICY, 1), parent.datums(POLICY, 1)
    assert ours.read_bytes() == theirs.read_bytes()
    assert final_weights(copy.path) != final_weights(parent.path)


@pytest.mark.story
def test_a_fork_outlives_its_parent(root: Path, parent: RunFolder, sampled: list[str]) -> None:
    middle = fork(parent, "middle", 2)
    copy = fork(middle, "outlives", 2)
    middle.delete()
    assert not middle.path.exists()
    train(RECIPE, run="outlives")
    assert final_weights(copy.path) == final_weights(parent.path)


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        (4, {}, "has done 3 steps: it can be forked at 0 to 3"),
        (3, {}, "give --set steps=4"),
        (1, {"model": {"lora_rank": 4}}, "model.lora_rank: 8 → 4: the weights are the parent's"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(
    root: Path, parent: RunFolder, step: int, changes: dict[str, object], said: str
) -> None:
    values = {"steps": 3, "checkpoints": {"every": 2}} | changes
    with pytest.raises(RunError) as raised:
        fork(parent, "refused", step, small_recipe(**values))
    assert said in str(raised.value)
    assert not list(root.glob("*refused*"))


def test_a_fork_s_closing_lines_say_what_it_trained_and_what_its_parent_had(
    parent: RunFolder,
) -> None:
    changed = ["--set", "optimizer.learning_rate=0.02", "--set", "evaluation.every=2"]
    said = CliRunner().invoke(
        app, ["fork", "parent", "--at", "2", "--run", "lines", *changed], catch_exceptions=False
    )
    _, _, lines = said.stdout.partition("trained ")
    since, *changes = (line.strip() for line in lines.splitlines()[:3])
    before = score_of(folder_of("lines"), 2)  # the parent has not scored checkpoint 2
    after = score_of(folder_of("lines"), 3)
    assert since == f"1 step since parent@2: held-out reward {before:.2f} → {after:.2f}"
    assert sorted(changes) == ["evaluation.every: 0 → 2", "optimizer.learning_rate: 0.005 → 0.02"]


def test_a_fork_of_a_checkpoint_that_nobody_scored_names_the_last_that_was(
    parent: RunFolder,
) -> None:
    copy = fork(parent, "unscored", 2)
    base = score_of(parent, 0)
    assert describe_origin(copy) == (
        f"0 steps since parent@2; parent@0 had held-out reward {base:.2f}"
    )
    assert describe_origin(parent) == ""


@pytest.mark.story
def test_a_replay_by_the_same_algorithm_gives_the_same_weights_and_samples_nothing(
    root: Path, parent: RunFolder, sampled: list[str]
) -> None:
    outcome = replay(RECIPE, "parent", run="again")
    assert [batch for batch in sampled if batch.startswith("train-")] == []
    assert final_weights(root / "again") == final_weights(parent.path)
    rows = read_metrics(root / "again" / "metrics.jsonl")
    assert [row["tokens/sampled"] for row in rows] == [0, 0, 0]
    assert [row["calls"] for row in rows] == [0, 0, 0]
    original = train(RECIPE, run="parent")
    assert (outcome.before, outcome.after) == (original.before, original.after)
    assert max(outcome.drift) <= 1e-8


@pytest.mark.story
def test_a_replay_by_another_algorithm_trains_and_reports_how_far_it_drifts(
    root: Path, parent: RunFolder, sampled: list[str]
) -> None:
    recipe = small_recipe(steps=3, checkpoints={"every": 2}, algorithm={"advantage": "centred"})
    outcome = replay(recipe, "parent", run="centred")
    assert {batch.split("-")[0] for batch in sampled} == {"test", "greedy"}
    assert final_weights(root / "centred") != final_weights(parent.path)
    assert outcome.drift[0] <= 1e-8  # its first weights are those that sampled
    assert outcome.drift[2] > 1e-6
    spans = inodes(folder_of("centred"), "spans/train-*.parquet")
    assert spans.items() <= inodes(parent, "spans/*.parquet").items()
    assert replay(recipe, "parent", run="centred") == outcome  # whole, so nothing is done again


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 4}, r"has recorded 3 of 4 steps: give --set steps=3$"),
        ({"seed": 1}, "seed: 0 → 1: nothing is sampled, so it would be ignored"),
    ],
)
def test_a_replay_refuses_what_it_would_ignore(
    root: Path, parent: RunFolder, changes: dict[str, object], said: str
) -> None:
    values = {"steps": 3, "checkpoints": {"every": 2}} | changes
    recipe = small_recipe(**values)
    with pytest.raises(RunError, match=said):
        replay_run(parent, "no", recipe.model_dump(mode="json"), recipe.fingerprint())
