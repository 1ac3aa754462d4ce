"""The recipe of a sweep: one recipe, and the values of its keys that are tried."""

import json
from itertools import product
from math import exp, log
from random import Random
from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from flows.recipe.run_recipe import FlowRecipe
from tasks.settings.section import Refusals, Section
from tasks.storage.run_folder import name_run

SHORT = {"learning_rate": "lr", "lora_rank": "rank"}
"""Ends of keys → what they are called in the names of runs."""
MOST_RUNS = 1000
MOST_AT_ONCE = 100

Selected: TypeAlias = Literal["reward", "greedy", "judged", "loss", "accuracy"]
Values = dict[str, Any]
"""Values of keys that make a run of a sweep."""


class Span(Section):
    """A range from which a number is drawn."""

    low: int | float
    """The lowest value. If it and `high` are whole numbers, so is what is drawn."""

    high: int | float
    """The highest value."""

    log: bool = False
    """Draw the logarithm evenly, not the number."""

    def refusals(self) -> Refusals:
        yield (
            self.low >= self.high or (self.log and self.low <= 0),
            f"low {self.low} and high {self.high} span nothing; give a lower low, above 0 with log",
        )

    def draw(self, drawn: Random) -> int | float:
        """Return a number, of three digits unless it is whole."""
        low, high = (log(self.low), log(self.high)) if self.log else (self.low, self.high)
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.log:
            return drawn.randint(self.low, self.high)
        value = drawn.uniform(low, high)
        return float(f"{exp(value) if self.log else value:.3g}")


class Draws(Section):
    """Values that are drawn."""

    runs: int = Field(ge=1, le=MOST_RUNS)
    """How many runs draw their values."""

    seed: int = 0
    """Seed of the draws."""

    keys: dict[str, tuple[Any, ...] | Span] = Field(min_length=1)
    """Keys of a recipe, each with a list of values, or with low and high."""

    def draw(self) -> list[Values]:
        """Draw the values of every run."""
        drawn = Random(self.seed)
        return [
            {
                key: of.draw(drawn) if isinstance(of, Span) else drawn.choice(of)
                for key, of in self.keys.items()
            }
            for _ in range(self.runs)
        ]


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

    random: Draws | None = None
    """Values that are drawn."""

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
        ways = [name for name in ("grid", "listed", "random") if getattr(self, name)]
        yield (
            len(ways) != 1,
            f"values are given by {', '.join(ways) or 'nothing'}; give one of grid, listed, random",
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
        if self.random is not None:
            return self.random.draw()
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
