"""compare and promote: pairs of the same examples, a gate that nothing worse passes, and names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.binding import bind_checkpoints
from ratchet.flows.checkpoints.names import CheckpointName, find_weights, promote
from ratchet.flows.cli.commands import app
from ratchet.flows.compare import compare
from ratchet.flows.opening.eval_targets import EvalTarget
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.comparison.comparisons import Comparison, NotBetter, most_different
from ratchet.tasks.comparison.promotions import Promotion, find_promotion, read_promotions
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.manifest import recipe_of, write_manifest
from ratchet.tasks.storage.owners import last_owner
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.runs.small_recipe import HELLO

SMALL = ["steps=2", "evaluation.examples=32", "evaluation.greedy=false", "checkpoints.every=1"]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return named_recipe("hello", [*SMALL, f"dataset.path={HELLO}"])


@pytest.fixture(scope="module")
def run(root: Path, recipe: Recipe, prefect_server: None, no_tinker: None) -> RunFolder:
    """A run whose two steps are a gain that 32 examples show."""
    train(recipe, run="one")
    return folder_of("one")


@pytest.fixture(scope="module")
def compared(run: RunFolder, recipe: Recipe) -> Comparison:
    return compare(recipe, ["base", "one@0", "one@2"])


@pytest.fixture
def named(run: RunFolder) -> Iterator[str]:
    """A name that one@2 has, beside no other name."""
    names = run.path.parent / "comparisons" / "promotions.jsonl"
    promote("one@2", "production")
    yield "production"
    names.unlink()


def test_the_same_weights_play_the_same_answers_so_that_all_examples_are_tied(
    compared: Comparison,
) -> None:
    base, untrained, trained = compared.targets
    assert (base.target, untrained.target, trained.target) == ("base", "one@0", "one@2")
    assert untrained.difference is not None
    assert (untrained.difference.tied, untrained.difference.mean) == (32, 0.0)
    assert untrained.tokens == base.tokens
    assert trained.difference is not None
    assert trained.difference.is_gain
    assert trained.difference.won > trained.difference.lost
    assert trained.reward is not None
    assert base.reward is not None
    assert trained.difference.mean == pytest.approx(trained.reward - base.reward)


def test_the_examples_on_which_two_differ_most_come_first(compared: Comparison) -> None:
    shown = most_different(compared, "one@2")
    distances = [abs(own["reward"] - other["reward"]) for own, other in shown]
    assert len(shown) == 3
    assert distances == sorted(distances, reverse=True)
    assert all(own["question"] == other["question"] for own, other in shown)
    assert all(own["answer"] != other["answer"] for own, other in shown)
    assert most_different(compared, "one@0") == []


def test_what_was_compared_is_read_and_opens_no_run_again(
    compared: Comparison, run: RunFolder, recipe: Recipe
) -> None:
    owner = last_owner(run.owners)
    assert compare(recipe, ["base", "one@0", "one@2"]) == compared
    assert last_owner(run.owners) == owner
    against = compare(recipe, ["base", "one@2"], against="one@2")
    assert against.targets[0].difference is not None
    assert against.targets[0].difference.won == compared.targets[2].difference.lost  # type: ignore
    assert against.folder != compared.folder


def test_what_a_run_has_played_is_not_played_again_for_keys_that_play_nothing(
    run: RunFolder, recipe: Recipe
) -> None:
    other = ["rollouts.groups=3", "rollouts.group_size=2", "rollouts.lag=1", "evaluation.every=1"]
    same = named_recipe("hello", [*SMALL, f"dataset.path={HELLO}", *other])
    for name, given in (("one@2", True), ("one@2", False), ("base", True)):
        asked = [EvalTarget.find(one, None, None, name, given) for one in (recipe, same)]
        assert asked[0].file == asked[1].file
        assert asked[1].tag == ""
    apart = named_recipe("hello", [*SMALL, f"dataset.path={HELLO}", "rollouts.max_tokens=9"])
    assert EvalTarget.find(apart, None, None, "one@2", True).tag != ""


def test_sql_sees_each_example_as_each_target_played_it(compared: Comparison) -> None:
    with open_views([], ["comparisons"]) as views:
        rows = views.sql(
            "select target, count(*), avg(reward) from comparisons where comparison = $name "
            "group by all order by all",
            params={"name": folder_of(compared.folder).name},
        ).fetchall()
    assert [(name, count) for name, count, _ in rows] == [
        (one.target, 32) for one in compared.targets
    ]
    assert rows[2][2] == pytest.approx(compared.targets[2].reward)


def test_the_table_is_no_wider_than_100_letters_and_json_is_the_record(
    compared: Comparison, recipe: Recipe, tmp_path: Path
) -> None:
    file = write_text(tmp_path / "hello.yaml", recipe.model_dump_json())
    command = ["compare", "base", "one@0", "one@2", "--agent", str(file)]
    table = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert "one@2 and base differ most in" in table
    assert "one@0 and base differ" not in table
    assert max(map(len, table.split("\n\n")[0].splitlines())) <= 100
    record = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert [one["target"] for one in record["targets"]] == ["base", "one@0", "one@2"]


@pytest.mark.parametrize(
    ("targets", "against", "said"),
    [
        (["one@2"], None, "at least two different ones can be compared"),
        (["one@2", "one"], None, "one@2, one are one@2, one@2"),
        (["base", "one@2"], "bas", "--against bas is none of base, one@2; did you mean 'base'"),
        (["base", "one@7"], None, "has no checkpoint 7; it has 0 to 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    run: RunFolder, recipe: Recipe, targets: list[str], against: str | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        compare(recipe, targets, against)


def test_a_name_means_the_checkpoint_that_had_it_last(run: RunFolder, named: str) -> None:
    said = CliRunner().invoke(app, ["promote", "one@0", named]).output
    assert said.splitlines()[0] == "production is one@0, and was one@2"
    promote("one@1", "other")
    found = {name: one.checkpoint for name, one in read_promotions().items()}
    assert found == {named: "one@0", "other": "one@1"}


def test_a_better_checkpoint_passes_and_neither_a_worse_one_nor_a_tie(
    compared: Comparison, recipe: Recipe, named: str
) -> None:
    compare(recipe, ["base", "one@2"]).check_gains()
    worse = compare(recipe, [named, "one@0"])
    with pytest.raises(NotBetter, match=r"one@0 is not shown to be better than one@2: reward -0"):
        worse.check_gains()
    with pytest.raises(NotBetter, match=r"than base: reward \+0.000 \(-0.*Play more by --ex"):
        compared.check_gains()


def test_a_checkpoint_of_which_more_rollouts_fail_does_not_pass(compared: Comparison) -> None:
    base, _, trained = compared.targets
    failing = compared.model_copy(
        update={"targets": (base, trained.model_copy(update={"failed": 1}))}
    )
    with pytest.raises(NotBetter, match="1 and 0 failed rollouts"):
        failing.check_gains()


@pytest.mark.parametrize(
    ("checkpoint", "name", "said"),
    [
        ("one@0", "one", "one is the name of the run"),
        ("one@0", "base", "base means something else already"),
        ("one@0", "a name", "cannot name a run"),
        ("one@9", "other", "has no checkpoint 9"),
        ("none@0", "other", "there is no run at"),
        ("one:policy@0", "other", "name the run's checkpoint RUN@STEP"),
    ],
)
def test_a_name_that_is_taken_or_a_checkpoint_that_is_none_is_refused(
    named: str, checkpoint: str, name: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        promote(checkpoint, name)


def test_a_name_is_taken_wherever_a_checkpoint_is(named: str, recipe: Recipe) -> None:
    assert CheckpointName.parse(named) == CheckpointName("one", "", 2)
    assert CheckpointName.parse(f"{named}:policy").title == "one:policy"
    assert find_weights(named).name == "one@2"
    assert EvalTarget.find(recipe, None, None, named, as_given=True).title == "one@2"
    values = recipe.model_dump(mode="json")
    started = Recipe.model_validate(values | {"model": values["model"] | {"start": named}})
    near = {"kl": {"coefficient": 0.1, "reference": named}}
    held = Recipe.model_validate(values | {"algorithm": values["algorithm"] | near})
    distilled = {"preset": "on_policy_distill", "teacher": {"models": [named]}}
    taught = Recipe.model_validate(values | {"algorithm": distilled})
    for one in (started, held, taught):
        bound = bind_checkpoints(one, {})[named]
        assert (bound["run"], bound["step"]) == ("one", 2), "the checkpoint, not the name"


def test_a_name_that_is_a_run_as_well_is_not_taken_for_either(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(folder_of(named).path)
    write_manifest(run, recipe_of(folder_of("one")), "any")
    try:
        with pytest.raises(UserError, match="both the checkpoint one@2 and a run; write"):
            CheckpointName.parse(named)
        assert CheckpointName.parse(f"{named}@1") == CheckpointName(named, "", 1)
        with monkeypatch.context() as later:
            later.setattr(Promotion, "is_kept", False)  # its own run is gone
            assert find_promotion(named) is None
    finally:
        run.delete()


def test_a_name_whose_run_is_another_one_by_now_is_refused(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"created": "later"}
    monkeypatch.setattr("ratchet.tasks.comparison.promotions.read_manifest", lambda _: made)
    with pytest.raises(UserError, match="is not that run any more; put that back, or"):
        CheckpointName.parse(named)


def test_a_gate_ends_the_command_by_status_1_after_the_table(
    compared: Comparison, recipe: Recipe, tmp_path: Path
) -> None:
    file = write_text(tmp_path / "hello.yaml", recipe.model_dump_json())
    gate = ["--agent", str(file), "--gate"]
    refused = CliRunner().invoke(app, ["compare", "one@2", "one@0", *gate])
    assert isinstance(refused.exception, NotBetter)
    assert refused.exception.status == 1
    assert "one@0 and one@2 differ most in" in refused.output
    assert CliRunner().invoke(app, ["compare", "base", "one@2", *gate]).exit_code == 0


def test_a_fork_may_be_named_by_its_checkpoint(named: str) -> None:
    refused = CliRunner().invoke(app, ["fork", "one"])
    assert "--at is missing" in str(refused.exception)
    refused = CliRunner().invoke(app, ["fork", named, "--run", "one", "--set", "steps=3"])
    assert "the run" in str(refused.exception)
    assert "one exists" in str(refused.exception)
