"""Every key of a recipe: another value changes what a run consumes, or is refused by its name."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError
from yaml import safe_load

from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import differing
from ratchet.tasks.algorithm.advantages import ADVANTAGES
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
from ratchet.tasks.algorithm.settings import Number
from ratchet.tasks.datums import to_datums
from ratchet.tasks.scoring import REFERENCE_SCHEMA as REFERENCES
from ratchet.tasks.settings.presets import PRESETS
from ratchet.tasks.settings.section import TABLES
from ratchet.tasks.storage.dotted_keys import find_value, flatten, merge_values, nest_value
from tests.support.credited import build
from tests.support.runs.small_recipe import small_recipe, taught
from tests.support.trajectory_rows import table

STEPS = 8
SMALL = small_recipe(steps=STEPS).model_dump(exclude_unset=True)


def frozen(value: Any) -> Any:
    """Return a value of YAML with tuples for its lists, as a recipe has them."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


OTHERS: Mapping[str, tuple[Any, ...]] = {
    key: frozen(values)
    for key, values in safe_load(Path(__file__).with_name("other_values.yaml").read_text()).items()
}
"""Key → values that are not its default."""

KL = {"algorithm": {"kl": {"coefficient": 0.1}}}
TEACHER = {"algorithm": {"teacher": {"models": ("run@3",)}}}
TEACHERS = {"algorithm": {"teacher": {"models": ("a=run@3", "b=run@5"), "by": "topic"}}}
EXPERT = {"algorithm": {"expert": {"path": "texts.jsonl"}}}
ATTENTION_ONLY = {"model": {"train_mlp": False, "train_unembedding": False}}
CONTEXTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "lag": {"rollouts": {"lag": 1, "batches": 2}},
    "rounds": {"rollouts": {"rounds": 3}},
    "calls": {"algorithm": {"trained_calls": 7}, "rollouts": {"rounds": 2}},
    "alone": {"algorithm": {"advantage": "rebn"}, "rollouts": {"group_size": 1}},
    "stream": {"rollouts": {"stream": True, "batches": 2}},
    "attempts": {"rollouts": {"attempts": 2}},
    "dask": {"rollouts": {"runner": "dask"}},
    "cluster": {"rollouts": {"runner": "dask", "cluster": "tcp://localhost:1"}},
    "cosine": {"optimizer": {"schedule": "cosine"}},
    "fixed": {"algorithm": {"aggregation": "fixed", "divisor": 3.0}},
    "project": {"tracking": {"project": "demo"}},
    "kl": KL,
    "kl in reward": merge_values(KL, {"algorithm": {"kl": {"placement": "reward"}}}),
    "teacher": TEACHER,
    "teachers": TEACHERS,
    "jsd": merge_values(TEACHER, {"algorithm": {"teacher": {"divergence": "jsd"}}}),
    "expert": EXPERT,
    "falling share": merge_values(
        EXPERT, {"algorithm": {"expert": {"final_share": 0.01, "decay_steps": 2}}}
    ),
    "command": {"agent": "command:true", "place": {"kept": "failed"}},
    "cage": {"agent": "command:true", "place": {"cage": "bwrap", "reward": "true"}},
    "judge": {"judge": {"agent": "some_judge"}},
    "opponent": {"roles": {"opponent": "policy"}},
    "pairs": {"judge": {"agent": "judge:pairs"}, "roles": {"judge": "checkpoint:run@3"}},
    "examiner": {
        "evaluation": {"judge": {"agent": "judge:pairs"}},
        "roles": {"judge": "checkpoint:run@3"},
    },
    "criteria": {
        "judge": {"agent": "judge:criteria", "criteria": {"It is true.": 1.0}},
        "roles": {"judge": "openai/gpt-4o"},
    },
    "attention": ATTENTION_ONLY,
    **{f"preset {name}": {"algorithm": taught(preset=name)} for name in PRESETS},
    **{f"advantage {name}": {"algorithm": taught(advantage=name)} for name in ADVANTAGES},
    **{f"loss {name}": {"algorithm": {"loss": name}} for name in TOKEN_LOSSES},
}
"""Recipes in which every key is tried."""
OF_REFERENCES = (
    "algorithm.kl.reference",
    *(f"algorithm.teacher.{name}" for name in ("models", "by", "reads")),
)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def recipe_of(context: Mapping[str, Any], *changes: Mapping[str, Any]) -> Recipe:
    """Make a small recipe of a context, and of changes over it."""
    base: Mapping[str, Any] = SMALL
    for change in (context, *changes):
        base = merge_values(base, change)
    return Recipe.model_validate(base)


def recipe_or_refusal(context: Mapping[str, Any], change: Mapping[str, Any]) -> Recipe | str:
    """Make a recipe, or return why it is refused."""
    try:
        return recipe_of(context, change)
    except ValidationError as error:
        return str(error)


@cache
def trajectories() -> Any:
    """Make two groups of four rollouts of two calls, whose calls have rewards."""
    generator, rows = np.random.default_rng(0), []
    for group in range(2):
        for rollout in range(4):
            length = 4 + rollout
            mask = [0, 1, 0, *[1] * (length - 3)]
            log_q = generator.normal(-1, 0.3, length)
            rows.append(
                {
                    "rollout_id": f"train-00000-000{group}-{rollout:02d}",
                    "group_id": f"train-00000-000{group}",
                    "role": "policy",
                    "first_call": 0,
                    "policy_version": "00000",
                    "reward": float(rollout == 1) - 0.5 * group,
                    "tokens": [10, 20, 10, *range(30, 27 + length)],
                    "logprobs": (log_q * mask).tolist(),
                    "mask": mask,
                    "call_numbers": [0, 1],
                    "call_tokens": [2, length - 2],
                    "call_rewards": [0.25 * rollout, float(rollout == 1) - 0.5 * group],
                }
            )
    return table(*rows)


@cache
def references() -> Any:
    """Make a reference that gives each sampled token a little less."""
    made = trajectories()
    columns = {name: made[name].combine_chunks() for name in REFERENCES.names[:-1]}
    logprobs = [
        [value - 0.1 * (place % 3) if bit else 0.0 for place, (value, bit) in enumerate(pairs)]
        for row in made.to_pylist()
        for pairs in [list(zip(row["logprobs"], row["mask"], strict=True))]
    ]
    return type(made).from_pydict({**columns, "logprobs": logprobs}, schema=REFERENCES)


def trained(recipe: Recipe) -> list[Any]:
    """Compute what the algorithm makes of the trajectories: the service's inputs and gradients."""
    return trained_by(recipe.model_dump_json())


@cache
def trained_by(text: str) -> list[Any]:
    recipe = Recipe.model_validate_json(text)
    credit, method = recipe.credit(), recipe.update_method()
    scored = {penalty.source: references() for penalty in credit.algorithm.penalties()}
    batch = build(trajectories(), credit, scored)
    loss = method.terms(0)[0].service_loss()
    found: list[Any] = [loss.name, dict(loss.settings), recipe.rollouts.lag]
    for datum in to_datums(batch, method.loss, method.loss_settings):
        inputs = {name: np.array(data.tolist()) for name, data in datum.loss_fn_inputs.items()}
        found.append({name: values.tolist() for name, values in inputs.items()})
        if loss.derivative is not None:
            for apart in np.linspace(-2, 2, 81):
                (slope,) = loss.derivative([inputs["logprobs"] + apart], [inputs])
                found.append(slope.tolist())
    return found


def consumed(recipe: Recipe, key: str) -> Any:
    """Return what a run reads of the section of a key."""
    values, section = recipe.model_dump(mode="json"), key.partition(".")[0]
    if key in OF_REFERENCES:
        return find_value(values, key), recipe.algorithm.penalties()
    if key.startswith("algorithm.expert."):
        expert = recipe.algorithm.expert
        return find_value(values, key), [*map(expert.share_at, range(recipe.steps))]
    if section == "algorithm":
        return trained(recipe)
    steps = range(recipe.steps)
    if section == "optimizer":
        method = recipe.update_method()
        requests = [method.request(step, []).optimizer.model_dump() for step in steps]
        units: Any = [[number] for number in range(16)]
        passes = method.request(0, [units] * len(method.terms(0))).optimizer_steps
        datums = [[asked.datums for asked in of_step] for of_step in passes]
        return requests, datums
    if section in ("evaluation", "checkpoints"):
        due = [find_value(values, section), getattr(recipe, section).due]
        return [*due[:1], [due[1](step, recipe.steps) for step in steps]]
    if section == "place":
        return recipe.place.of(Path("places"))
    if section == "judge":
        return values["judge"], recipe.judge.sampling()
    if section == "rollouts":
        rollouts = recipe.rollouts
        played = rollouts.sampling(), rollouts.greedy_sampling()
        sizes = rollouts.min_group_size(), rollouts.concurrency_of_batch()
        return values["rollouts"], played, sizes
    return recipe.train_split(), recipe.policies(), find_value(values, key)


def test_each_leaf_of_the_recipe_is_tried_with_a_value_that_is_not_its_default() -> None:
    keys = {*leaves(Recipe)}
    assert keys - {*TABLES} == OTHERS.keys() - {*TABLES}
    plain = small_recipe(steps=STEPS).model_dump()
    assert not [key for key in OTHERS if find_value(plain, key) in OTHERS[key]]


@pytest.mark.parametrize("context", CONTEXTS)
def test_another_value_of_a_key_changes_what_a_run_consumes_or_is_refused_by_its_name(
    context: str,
) -> None:
    base = recipe_of(CONTEXTS[context])
    values = base.model_dump()
    for key, others in OTHERS.items():
        unchanged = consumed(base, key)
        for other in others:
            if find_value(values, key) == other:
                continue
            changed = recipe_or_refusal(CONTEXTS[context], nest_value(key, other))
            if isinstance(changed, str):
                keys = (
                    [*flatten(PRESETS[other].values, TABLES)]
                    if key == "algorithm.preset"
                    else [key]
                )
                named = any(names(one, changed) for one in keys)
                assert named, f"{key}={other} is refused by: {changed}"
                continue
            assert consumed(changed, key) != unchanged, f"{key}={other} does nothing"


def names(key: str, said: str) -> bool:
    """Return whether a refusal names a key, or what it is a part of."""
    last = key.rpartition(".")[2]
    return last in said or f"the {last} " in said


def test_a_key_that_is_no_part_of_the_fingerprint_is_said_to_change_no_result() -> None:
    base = recipe_of({})
    for key, others in OTHERS.items():
        try:
            changed = recipe_of({}, nest_value(key, others[0]))
        except ValidationError:
            continue
        unbound = key in base.changes_no_result()
        if key != "algorithm.preset":
            assert (changed.fingerprint() == base.fingerprint()) == unbound, key
            assert (differing(base, changed) == []) == unbound, key


@pytest.mark.parametrize(
    ("kind", "table", "name"),
    [
        (kind, table, name)
        for kind, table in (("advantage", ADVANTAGES), ("loss", TOKEN_LOSSES))
        for name in table
    ],
)
def test_every_setting_of_a_row_changes_what_is_computed_or_is_refused(
    kind: str, table: Mapping[str, Any], name: str
) -> None:
    known = table[name].settings
    switches = [{}, *switched_on(known)]
    for switch in switches:
        given = {"algorithm": taught(**{kind: name}) | {f"{kind}_settings": switch}}
        base = trained(recipe_of(given))
        for setting, row in known.items():
            for other in values_of(row, switch.get(setting)):
                change = {f"{kind}_settings": switch | {setting: other}}
                changed = recipe_or_refusal(given, {"algorithm": change})
                if isinstance(changed, str):
                    assert setting in changed
                    continue
                assert trained(changed) != base, f"{setting}={other} beside {switch}"


def switched_on(known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, row in known.items():
        if not isinstance(row, Number):
            yield from ({name: value} for value in row.names if value != row.default)


def values_of(row: Any, given: Any) -> list[Any]:
    """Return values of a setting other than the one that it has."""
    now = row.default if given is None else given
    if not isinstance(row, Number):
        return [value for value in row.names if value != now]
    near = (now * 0.5, now * 1.5) if now else (0.6, 0.7)
    return [value for value in near if row.admits(value) and value != now]
