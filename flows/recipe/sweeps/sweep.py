"""The recipe of a sweep: one recipe, and the values of its keys that are tried."""

import json
from itertools import product
from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from flows.recipe.run_recipe import FlowRecipe
from flows.recipe.section import Refusals
from tasks.storage.run_folder import name_run

SHORT = {"learning_rate": "lr", "lora_rank": "rank"}
"""Ends of keys → what they are called in the names of runs."""
MOST_RUNS = 1000
MOST_AT_ONCE = 100

Selected: TypeAlias = Literal["reward", "greedy", "judged", "loss", "accuracy"]
Values = dict[str, Any]
"""Values of keys that make a run of a sweep."""


class SweepRecipe(FlowRecipe):
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

    listed: tuple[Values, ...] = ()
    """The values of each run, as a list of keys with a value."""

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
            bool(self.grid) == bool(self.listed),
            f"values are given by {'grid and listed' if self.grid else 'nothing'}; give one of "
            "grid, listed",
        )
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

    def values(self) -> list[Values]:
        """List the values of each run, in order."""
        combined = product(*self.grid.values()) if self.grid else ()
        return [*self.listed, *(dict(zip(self.grid, one, strict=True)) for one in combined)]


def name_child(run: str, values: Values) -> str:
    """Name a run after its values: RUN-lr0.001-rank8."""
    ends = [key.rpartition(".")[2] for key in values]
    parts = [
        f"{SHORT.get(end, end) if ends.count(end) == 1 else key}{_written(value)}"
        for (key, value), end in zip(values.items(), ends, strict=True)
    ]
    return name_run(run, *parts)


def as_overrides(values: Values) -> list[str]:
    """Return values as `--set` has them."""
    return [f"{key}={_written(value)}" for key, value in values.items()]


def _written(value: object) -> str:
    """Write a value as a command line has it, a list or a table as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
