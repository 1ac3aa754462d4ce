"""What every recipe of a run has, whichever flow it is of."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from adapters.calls import POLICY
from adapters.errors import UserError, counted
from adapters.rendering.renderer_names import AUTO, resolve_renderer
from flows.recipe.algorithm import names_checkpoint
from tasks.algorithm.learning_rates import default_learning_rate
from tasks.algorithm.settings import Settings
from tasks.examples.reading import Source
from tasks.settings.optimizer import Optimizer
from tasks.settings.section import LONGEST_SECONDS, MOST_ROLLOUTS, MOST_STEPS, Refusals, Section
from tasks.storage.manifest import Eras
from tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:  # they import torch, which takes seconds
    from tasks.recovery.recorded_steps import StepSource, TrainedPolicy
    from tasks.update_method import UpdateMethod


STATE = "tinker://"
SHAPE = ("lora_rank", "train_attention", "train_mlp", "train_unembedding", "renderer")
"""Keys of a model that a run has in common with the checkpoint at which it starts."""


class FlowError(UserError):
    """Refusal of a recipe whose flow is not known, or is not the one that is needed."""


class Model(Section):
    """The policy: a base model and the LoRA that is trained on it."""

    base: str = "local/tiny-chat"
    """A model of the Tinker service, or, on the engine, a shipped id, the name of a model that
    `ratchet fetch` has brought, a hub name, a directory, or a GGUF file."""

    renderer: Annotated[str, AfterValidator(resolve_renderer)] = AUTO
    """Renderer of messages as tokens: a name of the `renderers` package, or `jinja:` and a chat
    template, as its text or as a file whose text is then the recipe's. `auto` is the renderer that
    writes conversations as the model's own chat template does, or else that template."""

    thinking: bool | None = None
    """Ask the model to think before it answers, or not to; empty leaves it as the renderer or the
    template has it. Refused if these have no switch."""

    start: str | None = None
    """Checkpoint at which the weights start, instead of an untrained LoRA: `RUN@STEP`, `RUN@best`,
    `RUN:POLICY@STEP`, a name that `ratchet promote` has given, or `tinker://RUN/weights/NAME`, a
    training state of the service. Each policy starts at the one of its name, or else at the main
    one."""

    start_optimizer: bool = False
    """Start with the optimizer's moments of that checkpoint as well."""

    lora_rank: int = Field(default=16, ge=1, le=256)
    """Rank of the LoRA weights."""

    train_attention: bool = True
    """Train a LoRA on the attention's linear layers."""

    train_mlp: bool = True
    """Train a LoRA on the feed-forward layers."""

    train_unembedding: bool = True
    """Train a LoRA on the output layer."""

    def refusals(self) -> Refusals:
        yield (
            not (self.train_attention or self.train_mlp or self.train_unembedding),
            "train_attention, train_mlp and train_unembedding are all false, so that nothing is "
            "trained; leave one of them true",
        )
        yield (
            self.start_optimizer and self.start is None,
            "start_optimizer does nothing without start; give a checkpoint, or leave it out",
        )

    def differences(self, other: "Model") -> list[str]:
        """List what makes LoRA weights of the other model unfit for this one."""
        return [
            f"model.{key} {theirs}, and the recipe has {own}"
            for key in SHAPE
            if (theirs := getattr(other, key)) != (own := getattr(self, key))
        ]

    def names_state(self) -> bool:
        """Return whether the weights start at a path of the service."""
        return self.start is not None and self.start.startswith(STATE)


class Checkpoints(Section):
    """Settings of the saved weights."""

    every: int = Field(default=5, ge=1, le=MOST_STEPS)
    """Save weights and optimizer after every so many steps; the last is always saved."""

    ttl_seconds: int | None = Field(default=None, ge=3600, le=10**9)
    """Seconds for which the service keeps what a run saves; empty keeps it until it is deleted."""

    probe_tolerance: float | None = Field(default=1e-4, ge=0, le=1e6)
    """Largest difference of rebuilt weights to recorded log-probabilities; empty only reports it.
    A service that samples in another precision than it trains needs more."""

    def due(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` saves the training state."""
        return step == steps or step % self.every == 0


class HeldOut(Section):
    """Settings of what is measured on held-out examples."""

    every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Score after every so many steps; 0 scores only before the first and after the last."""

    examples: int = Field(default=128, ge=1, le=MOST_ROLLOUTS)
    """Held-out examples, the first of the test split in a seeded order; all if it has fewer."""

    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Seed of that order; by default the run's."""

    def drawn_by(self, seed: int) -> int:
        """Return the seed of the order, of a run that has a seed."""
        return seed if self.seed is None else self.seed

    def due(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` is scored."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


class ServicePatience(Section):
    """Patience with the Tinker service."""

    timeout_seconds: float = Field(default=600, gt=0, le=LONGEST_SECONDS)
    """The longest wait for one answer; then the task fails, and is retried on a new client."""


class Tracking(Section):
    """Trackers of experiments, beside the run's own files; none of them changes or stops a run."""

    project: str | None = None
    """The project of Weights & Biases to log to. Without WANDB_API_KEY the run is kept offline."""

    rollouts: int = Field(default=20, ge=0, le=1000)
    """Rollouts, texts or pairs in the W&B table of a step or an evaluation; 0 sends nothing that
    was said."""

    experiment: str | None = None
    """The experiment of MLflow to log to: at MLFLOW_TRACKING_URI, or else in mlflow.db beside the
    runs."""

    opentelemetry: Literal["calls", "messages"] | None = None
    """Export a span for each call by OTLP, to OTEL_EXPORTER_OTLP_ENDPOINT, with or without its
    messages."""

    def refusals(self) -> Refusals:
        yield (
            self.project is None and self.rollouts != type(self).model_fields["rollouts"].default,
            f"tracking.rollouts {self.rollouts} does nothing without tracking.project, whose "
            "tables they are in; give that, or leave rollouts out",
        )


@dataclass(frozen=True)
class Teachers:
    """Teachers of a recipe: the key that names them, their models by name, and what they read.

    The column `by` of an example names its teacher, if there are several. Only examples of the
    `splits` have one; without `splits`, all examples.
    """

    key: str
    models: Mapping[str, str]
    reads: str | None = None
    by: str | None = None
    splits: tuple[str, ...] | None = None


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


class RunRecipe(FlowRecipe, ABC):
    """Everything that a run of any flow depends on."""

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
    service: ServicePatience = ServicePatience()
    tracking: Tracking = Tracking()

    changes_no_result: ClassVar[Mapping[str, Any]] = {
        "epochs": True,
        "service": True,
        "tracking": {"rollouts", "experiment", "opentelemetry"},
        "checkpoints": {"probe_tolerance"},
    }
    """Keys that may change when a run continues."""

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

    @property
    def lag(self) -> int:
        """Steps by which the evaluation of a checkpoint may be behind the step that it samples."""
        return 0

    def steps_of(self, epochs: float) -> int:
        """Return in how many steps the flow has passed so often over its training examples."""
        raise FlowError(f"the flow {self.flow} has no examples to pass over; give steps")

    def sources(self) -> dict[str, Source]:
        """Map the splits that the flow reads, train and test, to where their examples are."""
        return {}

    def holds_out(self) -> bool:
        """Return whether there is anything on which checkpoints are measured."""
        return True

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
        from tasks.update_method import UpdateMethod

        return UpdateMethod(loss, settings, self.optimizer, self.steps, **more)

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: "Eras[RunRecipe]"
    ) -> "StepSource":
        """Return what restores the datums of a run's policy; `recipes` are the run's lineage."""
        from tasks.recovery.recorded_steps import StepSource

        return StepSource()

    def fingerprint(self) -> str:
        """Hash the recipe's canonical JSON by SHA-256; a run is bound to the hash.

        Keys that change no result are left out, so that they may change when a run continues.
        """
        canonical = json.dumps(self._bound_values(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _bound_values(self) -> dict[str, Any]:
        values = self.model_dump(mode="json", exclude={**self.changes_no_result})
        evaluation = values.get("evaluation", {})  # a flow may measure nothing
        if "seed" in evaluation and evaluation["seed"] is None:  # recipes that are older have none
            del evaluation["seed"]
        if values["model"]["thinking"] is None:
            del values["model"]["thinking"]
        return values
