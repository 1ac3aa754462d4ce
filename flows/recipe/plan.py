"""The recipes of several runs: stages, one after the other, and a sweep, one beside the other.

A plan is a list of children, each of which is a run with a recipe of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError, model_validator

from ratchet.flows.recipe.given_recipes import FinetuneRecipe, PreferRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
from ratchet.tasks.settings.section import Refusals, Section, explain
from ratchet.tasks.storage.dotted_keys import merge_values
from ratchet.tasks.storage.plan_record import ChildResult, PlanRecord

LAST, BEST = "last", "best"
STAGE_START = re.compile(r"(?:(?P<stage>\w+)@)?(?P<step>last|best|\d{1,9})", re.ASCII)
NAMED = re.compile(r"\{(\w+)\}")
"""Place of the run of an earlier stage in a text of a recipe."""

SHORT = {"learning_rate": "lr", "lora_rank": "rank"}
"""Ends of keys → what they are called in the names of runs."""
MOST_RUNS = 1000
MOST_AT_ONCE = 100

Selected: TypeAlias = Literal["reward", "greedy", "judged", "loss", "accuracy"]
Values = dict[str, Any]
"""Values of keys that make a run of a sweep."""

StageFlow: TypeAlias = Literal["train", "finetune", "prefer"]
FLOW_RECIPES: Mapping[str, type[RunRecipe]] = {
    "train": Recipe,
    "finetune": FinetuneRecipe,
    "prefer": PreferRecipe,
}


@dataclass(frozen=True)
class PlannedRun:
    """A run among several: its name, its recipe, and the runs that it waits for.

    `stage` is the name of its stage, and `start` the checkpoint where its weights start. A child
    that replays trains on the rollouts of the run `replayed`. Runs of an `arm` differ by seed.
    """

    name: str
    recipe: RunRecipe
    awaits: frozenset[str] = frozenset()
    stage: str = ""
    start: str = ""
    replayed: str | None = None
    arm: str = ""

    @property
    def flow(self) -> str:
        return self.recipe.flow if self.replayed is None else "replay"

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of that flow, as a Prefect server takes them."""
        parent = {} if self.replayed is None else {"parent": self.replayed}
        return {"recipe": self.recipe.model_dump(mode="json"), "run": self.name, **parent}


class Stage(Section):
    """A recipe among several, and the checkpoint of an earlier one at which its weights start."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]{1,60}$")
    """Its name, of letters, digits and _: its run is called RUN-NUMBER-NAME."""

    flow: StageFlow = "train"
    """The flow that its recipe is for."""

    start: str = Field(default=LAST, pattern=rf"^{STAGE_START.pattern.replace('?P<stage>', '?:')}$")
    """Checkpoint of the stage before at which its weights start: `last`; `best` on held-out
    examples; or a step. Of an earlier stage it is NAME@last, NAME@best or NAME@STEP."""

    recipe: Recipe | FinetuneRecipe | PreferRecipe
    """The keys of a recipe of its flow, without model.start. In a text, {NAME} is the run of the
    earlier stage NAME, as in `{texts}@best`."""

    @model_validator(mode="before")
    @classmethod
    def _recipe_is_of_the_flow(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        recipe, flow = values.get("recipe"), values.get("flow", "train")
        if not isinstance(recipe, Mapping) or flow not in FLOW_RECIPES:
            return values
        return {**values, "recipe": _validated(flow, recipe, str(values.get("name")))}


class PlanRecipe(FlowRecipe):
    """The recipe of several runs."""

    @property
    def by_workers(self) -> bool:
        """Whether workers of a Prefect server train the runs."""
        return False


class StagesRecipe(PlanRecipe):
    """The recipe of `stages`: several recipes, one after the other."""

    flow: str = "stages"
    """The flow that the recipe is for."""

    shared: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keys of several stages, such as model or seed, laid under recipes whose flows know them."""

    stages: tuple[Stage, ...]
    """The stages, in their order. `--set stages.NAME.recipe.KEY=…` changes one."""

    evaluate: Recipe | None = None
    """A recipe of train, whose agent plays the held-out examples of its dataset before the first
    stage and after each one, with the weights that the stage hands on."""

    @model_validator(mode="before")
    @classmethod
    def _shared_keys_are_laid_under(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("stages"), list | tuple):
            return values
        if not isinstance(shared := values.get("shared", {}), Mapping):
            return values
        stages = [
            {**one, "recipe": _lay_under(shared, str(one.get("flow", "train")), one.get("recipe"))}
            if isinstance(one, Mapping)
            else one
            for one in values["stages"]
        ]
        evaluated = values.get("evaluate")
        if isinstance(evaluated, Mapping):
            evaluated = _lay_under(shared, "train", evaluated)
        return {**values, "stages": stages, "evaluate": evaluated}

    def refusals(self) -> Refusals:
        names = self.names()
        yield not names, "there are no stages; give one or more"
        yield len({*names}) < len(names), f"stages {', '.join(names)}: give each another name"
        known = {key for stage in self.stages for key in type(stage.recipe).model_fields}
        yield (
            not self.shared.keys() <= known,
            f"shared {', '.join(sorted(self.shared.keys() - known))} is a key of no stage; leave "
            "it out",
        )
        yield (
            self.stages[0].start != LAST,
            f"start {self.stages[0].start} of the first stage {names[0]}, which has none before "
            "it; leave it out, or give recipe.model.start",
        )
        for number, stage in enumerate(self.stages):
            later = {*names[number:]} & {*NAMED.findall(_text(stage.recipe))}
            yield (
                later != set(),
                f"stage {stage.name} names the run of {', '.join(sorted(later))}, which begins no "
                "earlier; name a stage before it",
            )
            if number:
                yield from self._refused_start(number)

    def _refused_start(self, number: int) -> Refusals:
        """Yield what is wrong with the start of a stage that is not the first."""
        stage, before = self.stages[number], {one.name: one for one in self.stages[:number]}
        name, step = self._start(number)
        yield (
            name not in before,
            f"stage {stage.name} starts at {stage.start}, and no stage before it is called {name}; "
            f"give one of {', '.join(before)}",
        )
        parent, own = before[name].recipe, stage.recipe
        yield (
            own.model.start is not None,
            f"recipe.model.start {own.model.start} of stage {stage.name}, which starts at stage "
            f"{name}; give start of the stage in its place",
        )
        differing = own.model.differences(parent.model)
        if own.model.base != parent.model.base:
            differing.insert(0, f"model.base {parent.model.base}, and the recipe {own.model.base}")
        yield (
            differing != [],
            f"stage {stage.name} starts at stage {name}, which has {'; '.join(differing)}; give "
            "the same, best once as shared.model",
        )
        every = parent.checkpoints.every
        saved = parent.evaluation.every % every == 0 if step == BEST else True
        if step.isdecimal() and (steps := parent.steps):
            at, kept = int(step), parent.checkpoints
            saved = at <= steps and kept.due(at, steps) and kept.keeps(at, steps)
        yield (
            not saved,
            f"stage {stage.name} starts at step {step} of stage {name}, which saves and keeps no "
            f"training state of it; give a multiple of its checkpoints.every, {every}, for best "
            "also as its evaluation.every, and leave its checkpoints.keep out",
        )

    def trained(self) -> Sequence[RunRecipe]:
        return [child.recipe for child in self.children(self.subject)]

    def names(self) -> list[str]:
        return [stage.name for stage in self.stages]

    def children(self, run: str) -> list[PlannedRun]:
        """List the runs of the stages, whose names begin with that of the run of all.

        A stage waits for the one before it, for the one where it starts, and for those it names.
        """
        runs: dict[str, PlannedRun] = {}
        for number, stage in enumerate(self.stages):
            text, start = _text(stage.recipe), stage.recipe.model.start or ""
            awaits = runs.keys() & {*NAMED.findall(text)}
            for name, earlier in runs.items():
                text = text.replace(f"{{{name}}}", earlier.name)
            values = json.loads(text)
            if number:
                named, step = self._start(number)
                parent = runs[named]
                last = "" if parent.recipe.stop.is_given else str(parent.recipe.steps or "")
                step = step if step != LAST else last
                start = f"{parent.name}@{step}".removesuffix("@")
                values["model"]["start"] = start
                awaits |= {named, self.stages[number - 1].name}
            runs[stage.name] = PlannedRun(
                name=f"{run}-{number + 1}-{stage.name}",
                recipe=FLOW_RECIPES[stage.flow].model_validate(values),
                awaits=frozenset(runs[one].name for one in awaits),
                stage=stage.name,
                start=start,
            )
        return [*runs.values()]

    def reads_runs(self, stage: Stage) -> bool:
        """Return whether a stage's recipe names the run of another one."""
        return not {*self.names()}.isdisjoint(NAMED.findall(_text(stage.recipe)))

    def handed_on(self, name: str) -> str:
        """Return which checkpoint of a stage the next one starts at: its step, or last."""
        starts = (self._start(number) for number in range(1, len(self.stages)))
        return next((step for stage, step in starts if stage == name), LAST)

    def _start(self, number: int) -> tuple[str, str]:
        """Return the name of the stage at which a later one starts, and the step."""
        found = STAGE_START.fullmatch(self.stages[number].start)
        assert found is not None, "the pattern of the key"
        return found["stage"] or self.stages[number - 1].name, found["step"]


def _text(recipe: RunRecipe) -> str:
    return json.dumps(recipe.model_dump(mode="json"), ensure_ascii=False)


def _lay_under(shared: Mapping[str, Any], flow: str, recipe: Any) -> Any:
    """Lay what a flow knows of the shared keys under the keys of a recipe."""
    if not isinstance(recipe, Mapping) or flow not in FLOW_RECIPES:
        return recipe
    known = FLOW_RECIPES[flow].model_fields
    return merge_values({key: value for key, value in shared.items() if key in known}, recipe)


def _validated(flow: str, recipe: Mapping[str, Any], stage: str) -> RunRecipe:
    try:
        return FLOW_RECIPES[flow].model_validate({"flow": flow, **recipe})
    except ValidationError as error:
        raise ValueError(f"stage {stage}: {explain(error, FLOW_RECIPES[flow])}") from None


class SweepRecipe(PlanRecipe):
    """The recipe of `sweep`: the same run with other values, again and again."""

    flow: str = "sweep"
    """The flow that the recipe is for."""

    base: str | dict[str, Any] | None = None
    """The recipe whose keys are varied: its keys, with its flow, or its name."""

    replay: str | None = None
    """A run whose recorded rollouts every run trains on: no other is sampled. Its recipe is the
    base, unless one is given."""

    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict[str, tuple[Any, ...]])
    """Keys of a recipe, each with a list of values: every combination is a run."""

    listed: tuple[Values, ...] | dict[str, Values] = ()
    """The values of each run, as a list of keys with a value; or by a name, which its own name has
    in place of them. With `grid`, each of them with every combination."""

    select: Selected | None = None
    """Measure of the last checkpoint on held-out examples by which a run is chosen: `reward`,
    `greedy` of greedy rollouts, `judged` by a judge of evaluations, `loss` or `accuracy`; by
    default that of the flow."""

    at_once: int = Field(default=1, ge=1, le=MOST_AT_ONCE)
    """Runs that are trained at the same time. 1 trains them in turn, in the sweep's process; more
    are flow runs of a deployment, which the workers of a Prefect server train."""

    deployment: str | None = None
    """The deployment of the runs, FLOW/NAME; by default that of the name `base`, or else the first
    of the flow that has so many flow runs at a time."""

    @model_validator(mode="after")
    def _runs_are_few(self) -> "SweepRecipe":
        if not 1 <= (count := len(self.values())) <= MOST_RUNS:
            raise ValueError(f"there are {count} runs; give values for 1 to {MOST_RUNS}")
        return self

    def refusals(self) -> Refusals:
        yield (
            not self.grid and not self.listed,
            "values are given by nothing; give grid, listed or both",
        )
        listed = self.listed.values() if isinstance(self.listed, dict) else self.listed
        twice = sorted(self.grid.keys() & {key for values in listed for key in values})
        yield twice != [], f"{', '.join(twice)} is in grid and in listed; give it once"
        yield (
            self.base is None and self.replay is None,
            "a sweep varies a recipe, or the replays of a run; give base or replay",
        )
        empty = [key for key, values in self.grid.items() if not values]
        yield empty != [], f"grid: {', '.join(empty)} has no value; give some"
        yield (
            self.deployment is not None and self.at_once == 1,
            f"deployment {self.deployment} does nothing where the runs are trained in turn; give "
            "at_once, or leave it out",
        )

    @property
    def by_workers(self) -> bool:
        return self.at_once > 1

    def values(self) -> list[Values]:
        return [values for _, values in self.variants()]

    def variants(self) -> list[tuple[dict[str, str], Values]]:
        """List the values of each run, with the parts of its name by key; a given name has none."""
        if isinstance(self.listed, dict):
            listed = [*self.listed.items()]
        else:
            listed = [("", values) for values in self.listed or ({},)]
        combined = [dict(zip(self.grid, one, strict=True)) for one in product(*self.grid.values())]
        return [
            ({"": name, **name_parts(values)} if name else name_parts(own | values), own | values)
            for name, own in listed
            for values in combined
        ]


@dataclass(frozen=True)
class Plan:
    """Runs that are trained, each after those that it waits for, and the recipe of all.

    `measure` is what they are measured by, as the table of their results names it.
    """

    run: str
    recipe: PlanRecipe
    children: Sequence[PlannedRun]
    measure: str

    def record(self, results: Mapping[str, Sequence[ChildResult]]) -> PlanRecord:
        """Return the record of the runs, and of the results of some, by the runs' names."""
        names = [child.name for child in self.children]
        ended = [one for name in names for one in results.get(name, ())]
        return PlanRecord(self.recipe.model_dump(mode="json"), names, self.measure, ended)


def name_parts(values: Values) -> dict[str, str]:
    """Map each key to its part of the name of a run, which is RUN-lr0.001-rank8."""
    ends = [key.rpartition(".")[2] for key in values]
    return {
        key: f"{SHORT.get(end, end) if ends.count(end) == 1 else key}{_written(value)}"
        for (key, value), end in zip(values.items(), ends, strict=True)
    }


def as_overrides(values: Values) -> list[str]:
    return [f"{key}={_written(value)}" for key, value in values.items()]


def _written(value: object) -> str:
    """Write a value as a command line has it, a list or a table as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
