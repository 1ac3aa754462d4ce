"""The recipe: unknown keys, and knobs that would do nothing, are refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from yaml import safe_load

from ratchet.adapters.door.roles import CallsOf
from ratchet.adapters.errors import DELETED, OTHER_NAMES
from ratchet.flows.recipe.loading import RecipeError, check_binding, named_recipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import differing
from ratchet.tasks.settings.rollouts import Evaluation
from ratchet.tasks.settings.section import fields_of
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder
from tests.support.runs.small_recipe import small_recipe


def test_a_run_is_bound_to_any_value_that_changes_its_results() -> None:
    assert differing(small_recipe(), small_recipe()) == []
    assert differing(small_recipe(), small_recipe(seed=1)) == ["seed: 0 → 1"]
    assert small_recipe(seed=1).fingerprint() != small_recipe().fingerprint()


def test_every_number_has_a_largest_and_a_smallest_value() -> None:
    schema = Recipe.model_json_schema()
    fields = {
        f"{title}.{name}": field
        for title, section in {"Recipe": schema, **schema["$defs"]}.items()
        for name, field in section["properties"].items()
    }
    numbers = {
        name: kind
        for name, field in fields.items()
        for kind in field.get("anyOf", [field])
        if kind.get("type") in ("integer", "number")
    }
    assert len(numbers) > 30
    for name, kind in numbers.items():
        assert {"maximum", "exclusiveMaximum"} & kind.keys(), name
        assert {"minimum", "exclusiveMinimum"} & kind.keys(), name


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        small_recipe().steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_every_key_is_explained_where_prefects_form_reads_it() -> None:
    schema = Recipe.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert all(section["description"] for section in sections)
    fields = [field for section in sections for field in section["properties"].values()]
    values = [field for field in fields if "$ref" not in field]
    assert len(values) > 30
    assert all(field.get("description") for field in values)


def test_the_first_and_the_last_checkpoint_are_always_scored_and_the_last_saved() -> None:
    recipe = small_recipe(evaluation={"every": 4}, checkpoints={"every": 5})
    assert [step for step in range(11) if recipe.evaluation.due(step, 10)] == [0, 4, 8, 10]
    assert [step for step in range(1, 12) if recipe.checkpoints.due(step, 11)] == [5, 10, 11]


REFUSED = safe_load(Path(__file__).with_name("refused_recipes.yaml").read_text())


@pytest.mark.parametrize(("said", "changes"), [row for one in REFUSED for row in one.items()])
def test_a_recipe_that_breaks_a_rule_is_refused(said: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=said):
        small_recipe(**changes)


def test_a_run_is_bound_to_the_batches_of_streamed_steps() -> None:
    def recipe(batches: int, *, stream: bool) -> Recipe:
        return small_recipe(rollouts={"stream": stream, "batches": batches})

    assert differing(recipe(2, stream=False), recipe(3, stream=False)) == []
    assert differing(recipe(2, stream=True), recipe(3, stream=True)) == ["rollouts.batches: 2 → 3"]


def test_a_run_that_is_older_than_a_key_is_bound_to_its_default(tmp_path: Path) -> None:
    recipe, run = small_recipe(), RunFolder(tmp_path)
    values = recipe.model_dump(mode="json")
    del values["judge"], values["rollouts"]["max_calls"], values["dataset"]["splits"]
    write_manifest(run, values, "f00d")
    check_binding(run, recipe)
    with pytest.raises(RunError, match=r"differs in rollouts.max_calls: 100 → 50; give the"):
        check_binding(run, small_recipe(rollouts=values["rollouts"] | {"max_calls": 50}))


def test_an_evaluation_that_breaks_a_rule_goes_on_by_other_values_that_bind_nothing(
    tmp_path: Path,
) -> None:
    recipe, run = small_recipe(), RunFolder(tmp_path)
    answered = recipe.model_copy(update={"roles": {"policy": "openai/gpt-4o-mini"}})
    write_manifest(run, answered.model_dump(mode="json"), "f00d")
    patient = recipe.service.model_copy(update={"timeout_seconds": 700.0})
    check_binding(run, answered.model_copy(update={"service": patient}))
    with pytest.raises(RecipeError, match="openai/gpt-4o-mini"):
        check_binding(run, answered.model_copy(update={"seed": recipe.seed + 1}))


CLUSTER = {"runner": "dask", "cluster": "tls://10.0.0.1:8786"}


@pytest.mark.parametrize(
    "rollouts",
    [
        {"runner": "dask"},
        {"runner": "dask", "cluster": "tcp://127.0.0.1:8786"},
        {"runner": "dask", "cluster": "tcp://localhost:8786", "door": "http://localhost:8600"},
        CLUSTER | {"door": "https://flow.example.com:8600"},
    ],
)
def test_batches_may_be_played_on_a_cluster(rollouts: dict[str, object]) -> None:
    assert small_recipe(rollouts=rollouts).rollouts.runner == "dask"


@pytest.mark.parametrize(
    "changes",
    [
        {"rollouts": {"batches": 3}},
        {"rollouts": {"runner": "dask"}},
        {"rollouts": CLUSTER | {"door": "https://10.0.0.2:8600"}},
        {"service": {"timeout_seconds": 7}},
        {"checkpoints": {"probe_tolerance": None}},
    ],
)
def test_a_run_is_not_bound_to_what_changes_no_result(changes: dict[str, object]) -> None:
    bare = small_recipe(**{section: {} for section in changes})
    assert differing(small_recipe(**changes), bare) == []
    assert small_recipe(**changes).fingerprint() == bare.fingerprint()


def test_the_batches_of_a_step_share_its_concurrency() -> None:
    def concurrency(batches: int) -> int:
        rollouts = {"concurrency": 8, "batches": batches}
        return small_recipe(rollouts=rollouts).rollouts.concurrency_of_batch()

    assert [concurrency(batches) for batches in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_the_roles_that_the_policy_answers_are_trained_and_policy_always_is() -> None:
    roles = {"teller": "policy", "judge": "openai/gpt-4o-mini", "listener": "policy"}
    assert small_recipe(roles=roles).policies() == {"policy": ("policy", "listener", "teller")}
    assert small_recipe().policies() == {"policy": ("policy",)}


def test_each_policy_is_trained_in_its_own_roles_and_the_main_one_comes_first() -> None:
    roles = {"b": "policy:fox", "a": "policy:fox", "c": "policy", "d": "policy:ant", "e": "x/y"}
    policies = {"policy": ("policy", "c"), "ant": ("d",), "fox": ("a", "b")}
    assert small_recipe(roles=roles).policies() == policies
    assert [*small_recipe(roles=roles).policies()] == [*policies]


def test_the_fingerprint_of_a_recipe_is_the_same_in_all_versions_of_a_format() -> None:
    roles = {"teller": "policy", "listener": "policy"}
    dataset = {"path": "datasets/hello.csv", "columns": ["identity"]}
    recipe = Recipe.model_validate(
        {
            "agent": "whispers",
            "steps": 8,
            "roles": roles,
            "dataset": dataset,
            "optimizer": {"learning_rate": 0.005},
        }
    )
    known = "861d11dd8b650d0275fe335e2fdecf83e3e734b4fd4e3b06b1bdefc8db249992"
    assert recipe.fingerprint() == known


TITLES = {"who": "earlier:1", "when": {"system": "You write titles"}}


def test_a_role_that_a_policy_can_choose_by_a_message_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = "is chosen by what a message says, which the policy may say too"
    for who, when, warned in (
        ("earlier:1", {"system": "You write titles"}, 0),
        ("checkpoint:base", {"model": "*mini*", "path": "/messages"}, 0),
        ("checkpoint:base", {"system": "You write titles"}, 1),
        ("checkpoint:base", {"system": "You write titles", "model": "*mini*"}, 1),
    ):
        small_recipe(roles={"title": {"who": who, "when": when}}).check()
        assert caplog.text.count(said) == warned
    assert "checkpoint:base then answers it; give `when` a model or path" in caplog.text


def test_a_role_known_by_what_its_calls_say_has_no_address_of_its_own() -> None:
    recipe = small_recipe(roles={"title": TITLES, "teller": "policy"})
    assert recipe.answerers == {"title": "earlier:1", "teller": "policy"}
    assert recipe.sent_calls() == [CallsOf("title", system="You write titles")]
    assert recipe.plays() == (recipe.agent, ["policy", "teller"])
    assert recipe.policies() == {"policy": ("policy", "teller")}
    assert recipe.earlier(5) == {"earlier:1": 5}, "it is the policy as it is, and is not trained"
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert (again, again.fingerprint()) == (recipe, recipe.fingerprint())


def test_an_unknown_key_is_answered_with_a_key_that_there_is() -> None:
    known = {key for key, _ in fields_of(Recipe)}
    for wrong in ("foo", "a.b", "evaluation.n", "judge.model", "x" * 300, *DELETED, *OTHER_NAMES):
        if wrong not in known and " " not in wrong:
            with pytest.raises(RecipeError) as refused:
                named_recipe("hello", [f"{wrong}=1"])
            near = re.search(r"; did you mean '(.*)'\?", str(refused.value))
            assert near is None or near[1] in known
            assert near or "; earlier versions had it: " in str(refused.value)


def test_an_empty_table_that_is_set_takes_all_away() -> None:
    assert named_recipe("twenty_questions").roles != {}
    assert named_recipe("twenty_questions", ["roles={}"]).roles == {}
    assert named_recipe("twenty_questions", ["evaluation={}"]).evaluation == Evaluation()
    added = named_recipe("twenty_questions", ["roles={judge: openai/gpt-5-mini}"]).roles
    assert [*added] == ["answerer", "judge"]
    given = ["stages.rewards.recipe.rollouts={}", "stages.rewards.recipe.steps=2"]
    _, rewards, _ = named_recipe("hello-stages", given, StagesRecipe).stages
    assert (rewards.recipe.steps, rewards.recipe.rollouts.groups) == (2, 16)  # type: ignore[attr-defined]
