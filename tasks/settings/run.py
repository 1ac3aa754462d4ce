"""Settings that every run has, whichever flow it is of."""

from typing import Annotated

from pydantic import AfterValidator, Field

from ratchet.adapters.rendering.renderer_names import AUTO, resolve_renderer
from ratchet.tasks.settings.section import (
    LONGEST_SECONDS,
    MOST_ROLLOUTS,
    MOST_STEPS,
    Needs,
    Refusals,
    Section,
)

STATE = "tinker://"
SHAPE = ("lora_rank", "train_attention", "train_mlp", "train_unembedding", "renderer")
"""Keys of a model that a run has in common with the checkpoint at which it starts."""


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

    requirements = (Needs("start_optimizer", "start"),)

    def refusals(self) -> Refusals:
        yield (
            not (self.train_attention or self.train_mlp or self.train_unembedding),
            "train_attention, train_mlp and train_unembedding are all false, so that nothing is "
            "trained; leave one of them true",
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

    keep: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Keep so many of the newest checkpoints, the untrained one, the best, and those that a name,
    another run or a rebuild needs; delete the others, on the service too. Empty keeps all."""

    probe_tolerance: float | None = Field(default=1e-4, ge=0, le=1e6)
    """Largest difference of rebuilt weights to recorded log-probabilities; empty only reports it.
    Four times the difference of a service's sampler and trainer is allowed, if that is more."""

    def due(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` saves the training state."""
        return step == steps or step % self.every == 0

    def keeps(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` is kept for its number alone."""
        return self.keep is None or step == 0 or step > steps - self.keep


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


class Budget(Section):
    """Limits of what a run may spend. It is looked at between two steps, so that the last step and
    a last evaluation may go beyond; a deployed run then waits for approval, another one stops."""

    usd: float | None = Field(default=None, gt=0, le=1e9)
    """US dollars, the service's by its prices and helpers' by LiteLLM's."""

    tokens: int | None = Field(default=None, gt=0, le=10**15)
    """Tokens of prompts, cached or not, of answers and of training, together."""

    def limits(self) -> dict[str, float]:
        """Return the limits that are given, by their names."""
        return {name: limit for name, limit in self if limit is not None}


class ServicePatience(Section):
    """Patience with the Tinker service."""

    timeout_seconds: float = Field(default=600, gt=0, le=LONGEST_SECONDS)
    """The longest wait for one answer; then the task fails, and is retried on a new client."""


class Tracking(Section):
    """A tracker of experiments, beside the run's own files; it neither changes nor stops a run."""

    project: str | None = None
    """The project of Weights & Biases to log to. Without WANDB_API_KEY the run is kept offline."""

    rollouts: int = Field(default=20, ge=0, le=1000)
    """Rollouts, texts or pairs in the W&B table of a step or an evaluation; 0 sends nothing that
    was said."""

    requirements = (Needs("rollouts", "project"),)
