"""Curricula: the order in which the examples of a dataset are drawn."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.player_protocol import Failure
from adapters.project.modules import load_agent_file
from adapters.rewards import Reward
from benchmarks.interruptions.compare_runs import differing_parts, read_contents
from flows.recipe.recipe import Recipe
from flows.runtime.forks import fork_run
from flows.runtime.overlap import first_step_of_examples
from flows.train import train
from tasks.examples.curricula import Curriculum, Order, rank_by_reward, read_example_rewards
from tasks.examples.reading import DatasetError, Example, Source
from tasks.recording.journal import seal
from tasks.recording.spans import Span
from tasks.shards import choose_examples, read_shard
from tasks.storage.names import shard_name
from tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, train_whole
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update
from tests.tasks.test_journal import ended, written

hello = load_agent_file("hello")

PASSES: tuple[Order, ...] = ("shuffled", "sequential", "easy_to_hard")


def examples(*difficulties: float) -> list[Example]:
    return [{"example_id": n, "example": {"d": d}} for n, d in enumerate(difficulties)]


def series(order: Order, count: int, *difficulties: float) -> list[int]:
    """Return the ids of the first `count` examples that steps of one example draw."""
    curriculum = Curriculum(order, "d" if order == "easy_to_hard" else None)
    rows = examples(*difficulties)
    return [choose_examples(rows, 0, step, 1, curriculum)[0]["example_id"] for step in range(count)]


def test_a_sequential_order_is_that_of_the_file_pass_after_pass() -> None:
    assert series("sequential", 7, 3, 1, 2) == [0, 1, 2, 0, 1, 2, 0]


def test_an_order_from_easy_to_hard_ascends_in_each_pass_with_ties_shuffled_anew() -> None:
    drawn = series("easy_to_hard", 12, 2, 1, 2, 1, 2, 0.5)
    for begin in (0, 6):
        assert drawn[begin] == 5
        assert {*drawn[begin + 1 : begin + 3]} == {1, 3}
        assert {*drawn[begin + 3 : begin + 6]} == {0, 2, 4}
    assert drawn[:6] != drawn[6:]


@given(
    order=st.sampled_from(PASSES),
    difficulties=st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=12),
    turn=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_every_example_is_drawn_once_a_pass(
    order: Order, difficulties: list[float], turn: int, seed: int
) -> None:
    rows, curriculum = examples(*difficulties), Curriculum(order, "d")
    drawn = choose_examples(rows, seed, turn, len(rows), curriculum)
    assert sorted(row["example_id"] for row in drawn) == [*range(len(rows))]


@pytest.mark.parametrize(
    ("rewards", "under_way", "ranked"),
    [
        ({}, set[int](), [3, 0, 2, 1]),
        ({3: [0.0, 1.0], 0: [1.0, 1.0]}, set[int](), [2, 1, 3, 0]),
        ({3: [0.0, 1.0], 0: [1.0, 1.0]}, {2}, [1, 3, 0, 2]),
        ({3: [1.0], 0: [0.0], 2: [0.0, 1.0], 1: [0.0, 0.0, 1.0]}, set[int](), [2, 1, 3, 0]),
        ({3: [1.0, 1.0], 0: [0.0], 2: [], 1: [0.25, 0.75]}, set[int](), [1, 0, 3, 2]),
        ({3: [1.0], 0: [0.0], 2: [0.5], 1: [0.5]}, {2, 3}, [1, 0, 3, 2]),
    ],
    ids=["untried", "then the nearest", "under way", "ties", "fewer rewards", "last"],
)
def test_examples_are_ranked_by_the_distance_of_their_mean_reward_from_the_target(
    rewards: dict[int, list[float]], under_way: set[int], ranked: list[int]
) -> None:
    assert rank_by_reward([3, 0, 2, 1], rewards, under_way, target=0.5) == ranked


def test_a_target_prefers_easier_examples() -> None:
    rewards = {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}
    assert rank_by_reward([0, 1, 2], rewards, set(), target=0.9) == [1, 0, 2]


def end(kind: str, example: int, rollout: int, attempt: int = 0, reward: float = 0.0) -> Span:
    outcome = Failure("ValueError", "no") if kind == "error" else Reward(reward)
    span = ended(f"train-00000-000{example}-0{rollout}", outcome, attempt)
    return {**span, "attributes": {"example_id": example, "example": {}}}


def test_rollouts_that_failed_have_no_reward_and_those_that_were_played_again_have_one(
    tmp_path: Path,
) -> None:
    spans = [
        end("reward", 1, 0, reward=0.5),
        end("error", 1, 1),
        end("reward", 1, 1, attempt=1, reward=-1.0),
        end("error", 2, 0),
    ]
    sealed = seal(written(tmp_path / "a.jsonl", *spans), tmp_path / "a.parquet")
    assert read_example_rewards([sealed]) == {1: [0.5, -1.0], 2: []}


@pytest.mark.parametrize("value", ["hard", None, "nan"])
def test_a_difficulty_that_is_no_number_is_refused_with_its_row(
    tmp_path: Path, value: object
) -> None:
    dataset = tmp_path / "a.jsonl"
    rows: list[dict[str, object]] = [{"d": d, "split": "train"} for d in (1, "2.5")]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(dataset, "train", (), Curriculum("easy_to_hard", "d"))
    assert len(source.examples()) == 2
    rows.append({"d": value, "split": "train"})
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        DatasetError, match=r"row 2 of .* has no number as its d, but .*dataset.difficulty"
    ):
        source.examples()
    with pytest.raises(DatasetError, match="no column 'words'"):
        Source(dataset, "train", (), Curriculum("easy_to_hard", "words")).examples()


def test_rewards_of_another_dataset_or_agent_are_not_those_of_the_examples() -> None:
    def era(step: int, agent: str, path: str) -> tuple[int, dict[str, Any]]:
        return step, {"agent": agent, "dataset": {"path": path}}

    first, second, third = era(0, "a", "x.csv"), era(3, "a", "y.csv"), era(5, "a", "y.csv")
    assert first_step_of_examples([first]) == 0
    assert first_step_of_examples([first, second, third]) == 3
    assert first_step_of_examples([first, second, era(7, "b", "y.csv")]) == 7


STEPS = 5
WINS = (4, 2, 2, 3, 0, 1)
"""Rewarded rollouts of each example, of four; the shuffled order is 4, 2, 0, 5, 1, 3."""
DRAWN = {
    0: [[4, 2], [0, 5], [1, 3], [2, 1], [2, 1]],
    1: [[4, 2], [0, 5], [1, 3], [2, 5], [1, 3]],
}
"""Lag → the examples of each step. With lag 1, step 3 knows nothing of 1 and 3, and step 4 leaves
2 and 5 out, which are under way."""


async def play(example: dict[str, Any], *, base_url: str, **endpoint: str) -> float:
    """Play hello; the first rollouts of an example, as many as its `wins`, are rewarded."""
    await hello.play(example, base_url=base_url, **endpoint)
    (rollout,) = re.findall(r"-(\d\d)/attempt", base_url)
    return float(int(rollout) < example["wins"])


@pytest.fixture(scope="module", params=[0, 1], ids=["lag 0", "lag 1"])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    rows = [{"identity": f"otter {n}", "wins": wins} for n, wins in enumerate(WINS)]
    dataset = tmp_path_factory.mktemp("dataset") / "otters.jsonl"
    lines = [row | {"split": split} for split in ("train", "test") for row in rows]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return small_recipe(
        agent="tests.flows.test_curricula:play",
        dataset={"path": str(dataset), "columns": ["identity", "wins"], "order": "pass_rate"},
        steps=STEPS,
        rollouts={"groups": 2, "group_size": 4, "max_tokens": 4, "lag": request.param},
        evaluation={"examples": 1, "greedy": False},
    )


@pytest.fixture(scope="module")
def whole(
    recipe: Recipe,
    tmp_path_factory: pytest.TempPathFactory,
    prefect_server: None,
    no_tinker: None,
) -> Iterator[RunFolder]:
    with train_whole(recipe, tmp_path_factory.mktemp("runs")) as run:
        yield run


def drawn(run: RunFolder) -> list[list[int]]:
    shards = (read_shard(run.shard(shard_name("train", step))) for step in range(STEPS))
    return [[row["example_id"] for row in shard] for shard in shards]


@pytest.mark.story
def test_steps_draw_by_the_rewards_of_those_that_are_surely_done(
    recipe: Recipe, whole: RunFolder
) -> None:
    assert drawn(whole) == DRAWN[recipe.rollouts.lag]
    sealed = whole.sealed_steps(range(1, 3))
    assert Counter(path.name for path in sealed) == {
        "train-00001.0.parquet": 1,
        "train-00002.0.parquet": 1,
    }
    assert {n: sum(of) for n, of in read_example_rewards(sealed).items()} == {
        0: 4,
        5: 1,
        1: 2,
        3: 3,
    }


@pytest.mark.story
def test_a_second_run_in_more_batches_and_a_fork_draw_the_same(
    recipe: Recipe, whole: RunFolder
) -> None:
    values = recipe.model_dump(mode="json")
    fork = fork_run(whole, "fork", 2, values, recipe.fingerprint())
    train(recipe, run="fork")
    values["rollouts"]["batches"] = 2
    train(Recipe.model_validate(values), run="again")
    again = RunFolder(whole.path.parent / "again")
    for run in (fork, again):
        assert drawn(run) == drawn(whole)
        assert differing_parts(read_contents(run), read_contents(whole)) == []


@pytest.mark.story
@pytest.mark.parametrize(
    "kill",
    [partial(dying_in_batch, "train-00003.0"), partial(dying_in_update, 2)],
    ids=["batch", "update"],
)
def test_a_run_that_dies_draws_what_it_would_have_drawn(
    kill: Callable[[], AbstractContextManager[None]],
    recipe: Recipe,
    whole: RunFolder,
    tmp_path: Path,
) -> None:
    broken = die_and_go_on(recipe, kill(), tmp_path)
    assert differences(broken, whole) == []
    assert drawn(broken) == drawn(whole)
