"""The recipe: unknown keys, and knobs that would do nothing, are refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.adapters.door.roles import CallsOf
from ratchet.flows.recipe.loading import RecipeError, check_binding
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import differing
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder
from tests.support.runs.small_recipe import small_recipe


def test_a_misspelt_key_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"rollouts\.groupsize\n  Extra inputs are not"):
        small_recipe(rollouts={"groupsize": 4})


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollouts": {"stream": True}}, "batches 1 does nothing.*give 2 batches or more"),
        (
            {
                "rollouts": {"stream": True, "batches": 2},
                "algorithm": {"aggregation": "token_mean", "advantage": "rebn"},
            },
            "with algorithm.aggregation token_mean and algorithm.advantage rebn would change the",
        ),
        (
            {
                "rollouts": {"stream": True, "batches": 2},
                "optimizer": {"learning_rate": 0.1, "substeps": 2},
            },
            "with optimizer.substeps 2 and optimizer.epochs 1 would change the result",
        ),
        (
            {
                "rollouts": {"stream": True, "batches": 2},
                "algorithm": {"advantage": "rebn"},
            },
            "with algorithm.advantage rebn would change the result",
        ),
        ({"algorithm": {"divisor": 8.0}}, "aggregation sum with divisor 8.0: one without the oth"),
        ({"algorithm": {"aggregation": "fixed"}}, "aggregation fixed with divisor None"),
        (
            {"algorithm": {"advantage_settings": {"shift": -0.2}}},
            "the advantage standardized would ignore shift .it reads: threshold",
        ),
        (
            {"optimizer": {"learning_rate": 0.1, "final_fraction": 0.1}},
            "final_fraction 0.1 does nothing with schedule constant",
        ),
        (
            {"optimizer": {"learning_rate": 0.1, "warmup_steps": 9}, "steps": 9},
            "warmup_steps 9 never end in 9 steps",
        ),
    ],
)
def test_a_key_that_does_nothing_or_changes_the_result_is_refused(
    changes: dict[str, object], said: str
) -> None:
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
    ("rollouts", "said"),
    [
        ({"cluster": "tls://a:1"}, "would be ignored by the runner threads; give runner dask"),
        ({"runner": "dask", "door": "https://a:1"}, "would be reached by nobody"),
        ({"runner": "dask", "cluster": "10.0.0.1:8786"}, "is no address of a Dask scheduler"),
        ({"runner": "dask", "cluster": "tls://10.0.0.1"}, "is no address of a Dask scheduler"),
        (
            {"runner": "dask", "cluster": "tcp://10.0.0.1:8786"},
            "anybody on the network could run code.*write tls://10.0.0.1:8786",
        ),
        (CLUSTER | {"door": "https://10.0.0.2"}, "is no URL of a host and a port"),
        (CLUSTER | {"door": "https://10.0.0.2:99999"}, "is no URL of a host and a port"),
        (CLUSTER | {"door": "https://10.0.0.2:8600/v1"}, "is no URL of a host and a port"),
        (CLUSTER | {"door": "http://10.0.0.2:8600"}, "in clear; write https://10.0.0.2:8600"),
    ],
)
def test_a_place_of_batches_that_is_open_or_does_nothing_is_refused(
    rollouts: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        small_recipe(rollouts=rollouts)


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


def test_a_role_that_nobody_can_answer_is_refused() -> None:
    with pytest.raises(ValidationError, match="the role judge is answered by 'polcy'; give policy"):
        small_recipe(roles={"judge": "polcy"})


TITLES = {"who": "earlier:1", "when": {"system": "You write titles"}}


def test_a_role_known_by_what_its_calls_say_has_no_address_of_its_own() -> None:
    recipe = small_recipe(roles={"title": TITLES, "teller": "policy"})
    assert recipe.answerers == {"title": "earlier:1", "teller": "policy"}
    assert recipe.sent_calls() == [CallsOf("title", system="You write titles")]
    assert recipe.plays() == (recipe.agent, ["policy", "teller"])
    assert recipe.policies() == {"policy": ("policy", "teller")}
    assert recipe.earlier(5) == {"earlier:1": 5}, "it is the policy as it is, and is not trained"
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert (again, again.fingerprint()) == (recipe, recipe.fingerprint())


@pytest.mark.parametrize(
    ("roles", "refusal"),
    [
        ({"title": {"who": "earlier:1"}}, "roles.title.asked.when"),
        ({"title": {**TITLES, "when": {}}}, "nothing is said of the calls; give model, system"),
        ({"title": {**TITLES, "when": {"model": " ", "system": "x"}}}, "model is empty"),
        ({"title": {**TITLES, "when": {"path": "/embeddings"}}}, "path '/embeddings' is of no API"),
        ({"title": {**TITLES, "who": "gpt"}}, "the role title is answered by 'gpt'"),
        ({"policy": {**TITLES, "who": "policy"}}, "the role policy has the calls that no other"),
    ],
)
def test_a_role_whose_calls_say_nothing_is_refused(roles: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(refusal)):
        small_recipe(roles=roles)


def test_a_judge_asks_at_an_address_of_its_own() -> None:
    judged = {"agent": "judge:pairs"}
    with pytest.raises(
        ValidationError, match=r"roles.judge has the calls of the agent that say so"
    ):
        small_recipe(judge=judged, roles={"judge": {**TITLES, "who": "checkpoint:base"}})
