"""What every recipe of a run has, whichever flow it is of."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from ratchet.adapters.calls import POLICY, Sampling
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.project.hub import locate_dataset
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.examples.reading import Source, choose_teacher, data_files, fill_reads
from ratchet.tasks.given.measures import read_measure
from ratchet.tasks.settings.algorithm import names_checkpoint
from ratchet.tasks.settings.rollouts import Rollouts
from ratchet.tasks.settings.run import (
    Budget,
    Checkpoints,
    Model,
    Optimizer,
    ServicePatience,
    Stop,
    Tracking,
    default_learning_rate,
)
from ratchet.tasks.settings.section import MOST_STEPS, TABLES, Refusals, Section
from ratchet.tasks.storage.dotted_keys import flatten
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import ByStep, checksum, differences
from ratchet.tasks.storage.plan_record import Examples
from ratchet.tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:  # they import the SDK, which takes a while
    from ratchet.tasks.datums import UpdateMethod
    from ratchet.tasks.recovery.recorded_steps import StepSource, TrainedPolicy


MOST_TOKENS = 512
"""Limit of an answer for clients that name none, where no recipe has rollouts."""


@dataclass(frozen=True)
class Teachers:
    """Teachers of a recipe: the key that names them, their models by name, and what they read.

    The column `by` of an example names its teacher, if there are several. Only examples of the
    `splits` have one; without `splits`, all examples. They score the policy's tokens, or give so
    many `likeliest` ones at each place.
    """

    key: str
    models: Mapping[str, str]
    reads: str | None = None
    by: str | None = None
    splits: tuple[str, ...] | None = None
    likeliest: int = 0

    def check_places(self) -> None:
        """Refuse (UserError) a teacher of another service or server that cannot be asked."""
        elsewhere = [model for model in self.models.values() if "://" in model]
        if elsewhere:  # for which openai is imported
            from ratchet.adapters.clients.scoring_server import check_place

            for model in elsewhere:
                check_place(self.key, model, self.likeliest)

    def check_examples(self, sources: Mapping[str, Source]) -> None:
        """Refuse (DatasetError) an example that lacks its teacher's name, or what that one reads.

        Held-out rollouts have no teacher; held-out texts have one.
        """
        if self.by is None and self.reads is None:
            return
        for source in (sources[split] for split in self.splits or sources):
            for row in source.examples():
                if self.by is not None:
                    choose_teacher(row["example"], self.by, self.models)
                if self.reads is not None:
                    fill_reads(self.reads, row["example"])


class FlowRecipe(Section):
    """Parameters of a flow that trains; each such flow has a recipe of its own."""

    flow: str
    """The flow that the recipe is for."""

    @field_validator("flow")
    @classmethod
    def _flow_is_the_recipe_s(cls, flow: str) -> str:
        if flow != (own := cls.model_fields["flow"].default):
            raise ValueError(f"the keys are those of flow {own}; give that, or leave flow out")
        return flow

    @property
    def subject(self) -> str:
        """What a run is named after unless it is given a name."""
        return self.flow

    def names(self) -> list[str]:
        """List the names of the stages, in their order, if the flow has stages."""
        return []

    def trained(self) -> Sequence["RunRecipe"]:
        """List the recipes that the flow trains, as far as they are known before it begins."""
        return ()


class RunRecipe(FlowRecipe, ABC):
    """Everything that a run of any flow depends on."""

    plays_rollouts: ClassVar[bool] = False
    """Whether the flow plays an agent; another flow is given what it learns."""

    steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Optimizer steps; 0 counts them by `epochs`."""

    epochs: float = Field(default=0, ge=0, le=1e6)
    """Passes over the training examples, in place of `steps`: when a run begins, it is given
    ceil(epochs · examples / groups) steps."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """The one seed; all others derive from it."""

    model: Model = Model()
    optimizer: Optimizer = Field(default=Optimizer(), validate_default=True)
    checkpoints: Checkpoints = Checkpoints()
    stop: Stop = Stop()
    service: ServicePatience = ServicePatience()
    budget: Budget = Budget()
    tracking: Tracking = Tracking()

    if TYPE_CHECKING:  # each recipe has this section, at a place of its own
        evaluation: Any

    @field_validator("optimizer")
    @classmethod
    def _learning_rate_is_explicit(cls, optimizer: Optimizer, valid: ValidationInfo) -> Optimizer:
        if optimizer.learning_rate is not None or "model" not in valid.data:
            return optimizer
        rate = default_learning_rate(valid.data["model"].base)
        return optimizer.model_copy(update={"learning_rate": rate})

    def refusals(self) -> Refusals:
        steps, optimizer = self.steps, self.optimizer
        yield (
            (steps > 0) == (self.epochs > 0),
            f"steps {steps} with epochs {self.epochs:g}: give one of them, since a run is as long "
            "as either says",
        )
        yield (
            self.stop.is_given and (self.evaluation.every == 0 or not self.holds_out()),
            f"stop.{self.stop.given('when', 'patience')} does nothing where only the first and the "
            "last checkpoint are measured, or none; give evaluation.every, or leave it out",
        )
        if self.epochs:
            return  # the steps are counted when a run begins
        yield (
            optimizer.warmup_steps >= steps,
            f"optimizer.warmup_steps {optimizer.warmup_steps} never end in "
            f"{counted(steps, 'step')}; give fewer",
        )
        yield (
            optimizer.schedule != "constant" and steps - optimizer.warmup_steps < 2,
            f"optimizer.schedule {optimizer.schedule} does nothing, since it begins to fall where "
            f"the run of {counted(steps, 'step')} ends; give more steps, fewer warmup_steps, or "
            "schedule constant",
        )

    def check(self, run: RunFolder | None = None) -> None:
        """Refuse (UserError) a recipe that names what does not exist; quick checks come first.

        A `run` that has the tokens of its texts or pairs, and a fork of it, need no dataset.
        """
        self.model.check_service()
        if run is None or not run.given_files():
            for source in self.sources().values():
                source.examples()
            self.teachers().check_examples(self.sources())
        self.check_agent()
        self.model.check_renderer()

    def check_agent(self) -> None:
        """Refuse (UserError) an agent, or who answers it, that does not exist or does not fit."""

    def check_algorithm(self) -> None:
        """Refuse (UserError) a function of the project that is not as the recipe has it."""

    def changes_no_result(self) -> Set[str]:
        """Return the keys that may change when a run continues."""
        saved = {f"checkpoints.{key}" for key in ("keep", "probe_tolerance")}
        limits = {f"budget.{key}" for key in Budget.model_fields}
        return {"epochs", "service.timeout_seconds", "tracking.rollouts", *limits, *saved}

    @property
    def lag(self) -> int:
        """Steps by which the evaluation of a checkpoint may be behind the step that it samples."""
        return 0

    def earlier(self, _step: int) -> dict[str, int]:
        """Map who answers a role as an earlier policy to its checkpoint."""
        return {}

    def steps_of(self, epochs: float) -> int:
        """Return in how many steps the flow has passed so often over its training examples."""
        raise UserError(f"the flow {self.flow} has no examples to pass over; give steps")

    def sources(self) -> dict[str, Source]:
        """Map the splits that the flow reads, train and test, to where their examples are."""
        return {}

    def data_sets(self, *, bound: bool) -> list[str | None]:
        """List the data sets that are read; what is given to learn is read until it is `bound`."""
        return []

    def files(self) -> dict[str, list[Path]]:
        """Map names of further files of the project, by the recipe, to where they are."""
        return {}

    def checksums(self, run: RunFolder) -> dict[str, str]:
        """Map the files that a run is made of, but for own losses, to their checksums."""
        names = filter(None, self.data_sets(bound=run.bound_files() != []))
        data = {name: data_files(locate_dataset(name)) for name in names}
        return {name: checksum(paths) for name, paths in {**data, **self.files()}.items()}

    def holds_out(self) -> bool:
        """Return whether there is anything on which checkpoints are measured."""
        return True

    def sampling(self) -> Sampling:
        return Rollouts(max_tokens=MOST_TOKENS).sampling()

    def measures(self) -> list[str]:
        """List what a run may be chosen by; the first is the default."""
        return []

    def measured_by(self, select: str) -> dict[str, Any]:
        """Map keys of the recipe to what says how held-out examples are measured, for a measure.

        Runs that differ in it cannot be compared.
        """
        return {}

    def trained(self) -> Sequence["RunRecipe"]:
        return (self,)

    def is_measured(self, run: RunFolder, step: int) -> bool:
        """Return whether a run has measured its checkpoint `step` on held-out examples."""
        return is_written(run.measure(step))

    def read_measured(
        self, run: RunFolder, step: int, select: str
    ) -> tuple[float | None, tuple[float, float] | None]:
        """Read what a run has measured of a checkpoint by `select`, and its 95 % interval."""
        found = read_measure(run.measure(step))
        return found.value, found.interval

    def read_examples(self, run: RunFolder, step: int, select: str) -> Examples:
        """Read the measure of each held-out example; runs that draw others name them otherwise."""
        drawn = self.evaluation.drawn_by(self.seed)
        parts = read_measure(run.measure(step)).by_example
        return {f"{drawn}/{number}": part for number, part in enumerate(parts)}

    def scored_by(self) -> Iterator[str]:
        """Yield the keys by which a sampler of the service scores what it has not sampled."""
        yield from ()

    def given_examples(self) -> Mapping[str, Sized]:
        """Map the splits of what a run is given to learn, and does not play, to the examples."""
        return {}

    def queried_runs(self) -> Iterator[str]:
        """Yield the names of the runs from which a query takes what is learnt."""
        yield from ()

    def policies(self) -> dict[str, tuple[str, ...]]:
        """Map each policy to the roles that it is trained in, the main one first."""
        return {POLICY: (POLICY,)}

    def teachers(self) -> Teachers:
        """Return the teachers of the recipe; there may be none."""
        return Teachers("", {})

    def named_checkpoints(self) -> dict[str, str]:
        """Map each checkpoint of another run, RUN@STEP, to the key that names it.

        One that several keys name has that of the start, which needs most of it.
        """
        start, teachers = self.model.start, self.teachers()
        named = {
            model: teachers.key for model in teachers.models.values() if names_checkpoint(model)
        }
        if start is not None and not self.model.names_state():
            named[start] = "model.start"
        return named

    @abstractmethod
    def update_method(self) -> "UpdateMethod":
        """Return the loss, its settings and the optimizer, by which every step is trained."""

    def minimize(self, loss: str, settings: Settings, **more: Any) -> "UpdateMethod":
        """Return the method that minimizes a loss by the recipe's optimizer."""
        from ratchet.tasks.datums import UpdateMethod

        return UpdateMethod(loss, settings, self.optimizer, self.steps, **more)

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: "ByStep[RunRecipe]"
    ) -> "StepSource":
        """Return what restores the datums of a run's policy; `recipes` are the run's lineage."""
        from ratchet.tasks.recovery.recorded_steps import StepSource

        return StepSource()

    def fingerprint(self) -> str:
        """Hash the values that change results and are not defaults by SHA-256: a recipe's name."""
        flat = flatten(self.model_dump(mode="json", exclude_defaults=True), TABLES)
        free = self.changes_no_result()
        values = {key: value for key, value in flat.items() if key not in free and value != {}}
        return hashlib.sha256(json.dumps([self.flow, values], sort_keys=True).encode()).hexdigest()


def differing(old: RunRecipe, new: RunRecipe) -> list[str]:
    """List the values in which recipes differ that change results, as `section.key: old → new`."""
    free = old.changes_no_result() & new.changes_no_result()
    return without_free(old.model_dump(mode="json"), new.model_dump(mode="json"), free)


def without_free(
    old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str]
) -> list[str]:
    """List the differences of two recipes as JSON, but for those in keys that are `free`."""
    return [one for one in differences(old, new) if one.partition(":")[0] not in free]
