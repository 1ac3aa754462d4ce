"""Forks and replays: what lies before a step is shared, and the same settings give the same run."""

import json
from pathlib import Path

import pytest

from flows.recipe import Recipe
from flows.replay import replay
from flows.runtime.forks import fork_run, replay_run
from flows.train import train
from tasks.metrics import read_metrics
from tasks.rollouts import Runner
from tasks.storage.run_folder import RunError, delete_run, recipe_at
from tests.small_recipe import small_recipe
from tests.test_train import final_weights, without_clocks

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")

RECIPE = small_recipe(steps=3, checkpoints={"every": 2})


@pytest.fixture(scope="module")
def parent(root: Path, prefect_server: None, no_tinker: None) -> Path:
    train(RECIPE, run="parent")
    return root / "parent"


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batches that are sampled from now on."""
    batches, collect = [], Runner.collect

    def counted(runner: Runner, rollouts: object, journal: Path, *rest: object) -> None:
        batches.append(journal.stem)
        collect(runner, rollouts, journal, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "collect", counted)
    return batches


def fork(parent: Path, name: str, step: int, recipe: Recipe = RECIPE) -> Path:
    return fork_run(parent, name, step, recipe.model_dump(mode="json"), recipe.fingerprint())


def inodes(run: Path, pattern: str) -> dict[str, int]:
    return {str(path.relative_to(run)): path.stat().st_ino for path in run.glob(pattern)}


@pytest.mark.parametrize("step", [1, 2])
def test_a_fork_with_unchanged_settings_is_its_parent_bit_for_bit(
    parent: Path, sampled: list[str], step: int
) -> None:
    copy = fork(parent, f"same-{step}", step)
    train(RECIPE, run=copy.name)
    assert final_weights(copy) == final_weights(parent)
    assert without_clocks(copy) == without_clocks(parent)
    for name in ("datums/00001.parquet", "datums/00002.parquet"):
        assert (copy / name).read_bytes() == (parent / name).read_bytes()
    trained = [batch for batch in sampled if batch.startswith("train-")]
    assert trained == [f"train-{later:05d}" for later in range(step, 3)]


def test_a_fork_shares_the_files_before_its_step_and_copies_none(parent: Path) -> None:
    copy = fork(parent, "shares", 2)
    ours, theirs = inodes(copy, "*/*.*"), inodes(parent, "*/*.*")
    assert {"spans/train-00001.parquet", "journal/train-00001.jsonl", "datums/00001.parquet"} <= (
        ours.keys()
    )
    assert {name for name in ours if "-00002." in name or name.endswith("/00002.parquet")} == set()
    assert all(inode == theirs[name] for name, inode in ours.items())
    tensors = inodes(copy, "engine/tensors/**/*.safetensors")
    assert tensors
    assert tensors.items() <= inodes(parent, "engine/tensors/**/*.safetensors").items()
    assert [row["step"] for row in read_metrics(copy / "metrics.jsonl")] == [0, 1]


def test_a_fork_says_whose_it_is(parent: Path) -> None:
    recipe = small_recipe(steps=3, checkpoints={"every": 2}, optimizer={"learning_rate": 0.1})
    copy = fork(parent, "named", 1, recipe)
    said = json.loads((copy / "manifest.json").read_text())["parent"]
    assert (said["run"], said["step"], said["fingerprint"]) == ("parent", 1, RECIPE.fingerprint())
    rates = [recipe_at(copy, step)["optimizer"]["learning_rate"] for step in (0, 1)]
    assert rates == [0.005, 0.1]
    again = fork_run(copy, "named-again", 1, RECIPE.model_dump(mode="json"), RECIPE.fingerprint())
    assert recipe_at(again, 0)["optimizer"]["learning_rate"] == 0.005


def test_what_lies_before_a_fork_stays_the_parents_under_other_settings(parent: Path) -> None:
    recipe = small_recipe(steps=2, optimizer={"learning_rate": 0.05}, checkpoints={"every": 2})
    copy = fork(parent, "faster", 1, recipe)  # checkpoint 1 has no saved state: it is rebuilt
    train(recipe, run="faster")
    first, second = without_clocks(copy)
    assert [first, second] == without_clocks(parent)[:2]  # the second step's policy is the parent's
    assert (copy / "datums/00001.parquet").read_bytes() == (
        parent / "datums/00001.parquet"
    ).read_bytes()
    assert final_weights(copy) != final_weights(parent)


def test_a_fork_outlives_its_parent(root: Path, parent: Path, sampled: list[str]) -> None:
    middle = fork(parent, "middle", 2)
    copy = fork(middle, "outlives", 2)
    delete_run(middle)
    assert not middle.exists()
    train(RECIPE, run="outlives")
    assert final_weights(copy) == final_weights(parent)


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        (4, {}, "has done 3 steps: it can be forked at 0 to 3"),
        (3, {}, "give --set steps=4"),
        (1, {"model": {"lora_rank": 4}}, "model.lora_rank: 8 → 4: the weights are the parent's"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(
    root: Path, parent: Path, step: int, changes: dict[str, object], said: str
) -> None:
    values = {"steps": 3, "checkpoints": {"every": 2}} | changes
    with pytest.raises(RunError) as raised:
        fork(parent, "refused", step, small_recipe(**values))
    assert said in str(raised.value)
    assert not list(root.glob("*refused*"))


def test_a_fork_does_not_take_the_place_of_a_run(parent: Path) -> None:
    with pytest.raises(RunError, match="give another --as"):
        fork(parent, "parent", 1)


def test_a_replay_by_the_same_algorithm_gives_the_same_weights_and_samples_nothing(
    root: Path, parent: Path, sampled: list[str]
) -> None:
    outcome = replay(RECIPE, "parent", run="again")
    assert [batch for batch in sampled if batch.startswith("train-")] == []
    assert final_weights(root / "again") == final_weights(parent)
    rows = read_metrics(root / "again" / "metrics.jsonl")
    assert [row["tokens/sampled"] for row in rows] == [0, 0, 0]
    assert [row["calls"] for row in rows] == [0, 0, 0]
    original = train(RECIPE, run="parent")
    assert (outcome.before, outcome.after) == (original.before, original.after)
    assert max(outcome.drift) <= 1e-8


def test_a_replay_by_another_algorithm_trains_and_reports_how_far_it_drifts(
    root: Path, parent: Path, sampled: list[str]
) -> None:
    recipe = small_recipe(steps=3, checkpoints={"every": 2}, algorithm={"advantage": "centred"})
    outcome = replay(recipe, "parent", run="centred")
    assert {batch.split("-")[0] for batch in sampled} == {"test", "greedy"}
    assert final_weights(root / "centred") != final_weights(parent)
    assert outcome.drift[0] <= 1e-8  # its first weights are those that sampled
    assert outcome.drift[2] > 1e-6
    spans = inodes(root / "centred", "spans/train-*.parquet")
    assert spans.items() <= inodes(parent, "spans/*.parquet").items()
    assert replay(recipe, "parent", run="centred") == outcome  # whole, so nothing is done again


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 4}, "has recorded 3 of 4 steps: give --set steps=3"),
        ({"seed": 1}, "seed: 0 → 1: nothing is sampled, so it would be ignored"),
    ],
)
def test_a_replay_refuses_what_it_would_ignore(
    root: Path, parent: Path, changes: dict[str, object], said: str
) -> None:
    values = {"steps": 3, "checkpoints": {"every": 2}} | changes
    recipe = small_recipe(**values)
    with pytest.raises(RunError) as raised:
        replay_run(parent, "no", recipe.model_dump(mode="json"), recipe.fingerprint())
    assert said in str(raised.value)
