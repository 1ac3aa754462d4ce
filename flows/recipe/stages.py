"""The recipe of stages: recipes of other flows, each of which starts where one before it ended."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError, model_validator

from adapters.errors import counted
from flows.recipe.finetuning import FinetuneRecipe
from flows.recipe.preferring import PreferRecipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import FlowRecipe, RunRecipe
from tasks.settings.section import Refusals, Section, explain
from tasks.storage.keys import merge
from tasks.storage.stages import name_stage_run

LAST, BEST = "last", "best"
START = re.compile(r"(?:(?P<stage>\w+)@)?(?P<step>last|best|\d{1,9})", re.ASCII)
NAMED = re.compile(r"\{(\w+)\}")
"""Place of the run of an earlier stage in a text of a recipe."""

StageFlow: TypeAlias = Literal["train", "finetune", "prefer"]
KINDS: Mapping[str, type[RunRecipe]] = {
    "train": Recipe,
    "finetune": FinetuneRecipe,
    "prefer": PreferRecipe,
}


class Stage(Section):
    """A recipe among several, and the checkpoint of an earlier one at which its weights start."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]{1,60}$")
    """Its name, of letters, digits and _: its run is called RUN-NUMBER-NAME."""

    flow: StageFlow = "train"
    """The flow that its recipe is for."""

    start: str = Field(default=LAST, pattern=rf"^{START.pattern.replace('?P<stage>', '?:')}$")
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
        if not isinstance(recipe, Mapping) or flow not in KINDS:
            return values
        return {**values, "recipe": _validated(flow, recipe, str(values.get("name")))}


@dataclass(frozen=True)
class StageRun:
    """The run of a stage: its name, its recipe, and the stage and checkpoint where it starts."""

    stage: str
    name: str
    recipe: RunRecipe
    parent: "StageRun | None"
    start: str


class StagesRecipe(FlowRecipe):
    """The recipe of `stages`: several recipes, one after the other."""

    flow: str = "stages"
    """The flow that the recipe is for."""

    shared: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keys of a recipe that several stages have, such as model or seed: they are laid under the
    recipes whose flows know them."""

    stages: tuple[Stage, ...] = Field(min_length=1)
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
        for stage in self.stages if self.evaluate else ():
            assert self.evaluate is not None
            missing = sorted(self.evaluate.policies().keys() - stage.recipe.policies().keys())
            yield (
                missing != [],
                f"evaluate needs the policy {', '.join(missing)}, which stage {stage.name} does "
                "not train; evaluate an agent whose policies all stages train",
            )

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
        yield (
            parent.checkpoints.ttl_seconds is not None,
            f"checkpoints.ttl_seconds {parent.checkpoints.ttl_seconds} of stage {name}, at whose "
            f"checkpoint stage {stage.name} starts: it may expire before; leave it out there",
        )
        evaluation, saved = parent.evaluation.every, parent.checkpoints.every
        yield (
            step == BEST and evaluation % saved != 0,
            f"stage {stage.name} starts at the best checkpoint of stage {name}, which measures "
            f"every {counted(evaluation, 'step')} and saves its training state every {saved}; give "
            "checkpoints.every a divisor of evaluation.every",
        )
        yield (
            step.isdecimal() and parent.steps > 0 and not _is_saved(parent, int(step)),
            f"stage {stage.name} starts at step {step} of stage {name}, which saves its training "
            f"state every {saved} of {counted(parent.steps, 'step')}; give such a step",
        )

    def names(self) -> list[str]:
        """List the names of the stages, in their order."""
        return [stage.name for stage in self.stages]

    def runs_of(self, run: str) -> Iterator[StageRun]:
        """Yield the runs of the stages, whose names begin with that of the run of all."""
        runs: dict[str, StageRun] = {}
        for number, stage in enumerate(self.stages):
            text, start = _text(stage.recipe), stage.recipe.model.start or ""
            for name, earlier in runs.items():
                text = text.replace(f"{{{name}}}", earlier.name)
            values, parent = json.loads(text), None
            if number:
                named, step = self._start(number)
                parent = runs[named]
                step = step if step != LAST else str(parent.recipe.steps or "")
                start = f"{parent.name}@{step}".removesuffix("@")
                values["model"]["start"] = start
            recipe = KINDS[stage.flow].model_validate(values)
            name = name_stage_run(run, number + 1, stage.name)
            runs[stage.name] = StageRun(stage.name, name, recipe, parent, start)
            yield runs[stage.name]

    def reads_runs(self, stage: Stage) -> bool:
        """Return whether a stage's recipe names the run of another one."""
        return not {*self.names()}.isdisjoint(NAMED.findall(_text(stage.recipe)))

    def needs(self, name: str) -> set[str]:
        """Return the stages whose runs a stage reads: where it starts, and those it names."""
        number = self.names().index(name)
        start = {self._start(number)[0]} if number else set[str]()
        return start | {*self.names()}.intersection(
            NAMED.findall(_text(self.stages[number].recipe))
        )

    def handed_on(self, name: str) -> str:
        """Return which checkpoint of a stage the next one starts at: its step, or last."""
        starts = (self._start(number) for number in range(1, len(self.stages)))
        return next((step for stage, step in starts if stage == name), LAST)

    def _start(self, number: int) -> tuple[str, str]:
        """Return the name of the stage at which a later one starts, and the step."""
        found = START.fullmatch(self.stages[number].start)
        assert found is not None, "the pattern of the key"
        return found["stage"] or self.stages[number - 1].name, found["step"]


def _is_saved(recipe: RunRecipe, step: int) -> bool:
    return step <= recipe.steps and recipe.checkpoints.due(step, recipe.steps)


def _text(recipe: RunRecipe) -> str:
    return json.dumps(recipe.model_dump(mode="json"), ensure_ascii=False)


def _lay_under(shared: Mapping[str, Any], flow: str, recipe: Any) -> Any:
    """Lay what a flow knows of the shared keys under the keys of a recipe."""
    if not isinstance(recipe, Mapping) or flow not in KINDS:
        return recipe
    known = KINDS[flow].model_fields
    return merge({key: value for key, value in shared.items() if key in known}, recipe)


def _validated(flow: str, recipe: Mapping[str, Any], stage: str) -> RunRecipe:
    try:
        return KINDS[flow].model_validate({"flow": flow, **recipe})
    except ValidationError as error:
        raise ValueError(f"stage {stage}: {explain(error)}") from None
