"""Settings that every run has, whichever flow it is of."""

import operator
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from math import cos, pi
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from ratchet.adapters.errors import UserError, did_you_mean
from ratchet.adapters.rendering.renderer_names import (
    AUTO,
    TEMPLATE,
    find_config,
    resolve_renderer,
    set_thinking,
)
from ratchet.adapters.tinker.bases import base_folder, check_base, open_tokenizer
from ratchet.adapters.tinker.engines import check_key, check_reachable
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

    def check_service(self) -> None:
        """Refuse (UserError) a service or a base model that does not exist.

        A service is only looked for, and asked nothing, so it may still refuse a base model.
        """
        check_key()
        check_reachable()
        check_base(self.base)

    def check_renderer(self) -> None:
        """Refuse (UserError) a renderer that does not exist, or does not fit a local model.

        So is a value of `thinking` that the renderer or template has no switch for. `auto` fits
        each model that has a chat template.
        """
        folder = base_folder(self.base)
        if folder is not None:
            from ratchet.adapters.rendering.chat import Chat

            Chat(open_tokenizer(self.base), self.renderer, thinking=self.thinking)
        elif self.renderer != AUTO and not self.renderer.startswith(TEMPLATE):
            config = find_config(self.renderer)
            if self.thinking is not None:
                set_thinking(config, self.thinking)


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
    """Seed of that order, and of what is sampled for these examples; by default the run's."""

    def drawn_by(self, seed: int) -> int:
        """Return the seed of evaluations, of a run that has a seed."""
        return seed if self.seed is None else self.seed

    def due(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` is scored."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


class Budget(Section):
    """Limits of what a run may spend. They are checked after each step, so one step and one
    evaluation may exceed them. Then a deployed run waits for approval; any other stops."""

    usd: float | None = Field(default=None, gt=0, le=1e9)
    """US dollars, the service's by its prices and helpers' by LiteLLM's."""

    tokens: int | None = Field(default=None, gt=0, le=10**15)
    """Tokens of prompts, cached or not, of answers and of training, together."""

    def limits(self) -> dict[str, float]:
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
    """Rollouts, texts or pairs in the W&B table of a step or an evaluation; 0 sends none."""

    requirements = (Needs("rollouts", "project"),)

    def check_installed(self) -> None:
        """Refuse (UserError) W&B if its library, which is not imported, is not installed."""
        if self.project is not None and find_spec("wandb") is None:
            raise UserError(
                "the recipe has tracking.project, and wandb is not installed: "
                "`pip install 'ratchet-rl[tracking]'`, or leave tracking.project empty"
            )


FULL_TRAINING = 5e-5
"""Learning rate of full training at the hidden size CALIBRATED_WIDTH."""
LORA = 10.0
"""Factor between the learning rates of LoRA and of full training, whatever the LoRA's rank."""
CALIBRATED_WIDTH = 2000

LLAMA, QWEN = 0.781, 0.0775
"""Exponents of CALIBRATED_WIDTH / hidden size in the two families."""

CALIBRATED: Mapping[str, tuple[int, float]] = {
    "meta-llama/Llama-3.2-1B": (2048, LLAMA),
    "meta-llama/Llama-3.2-3B": (3072, LLAMA),
    "meta-llama/Llama-3.1-8B": (4096, LLAMA),
    "meta-llama/Llama-3.1-8B-Instruct": (4096, LLAMA),
    "meta-llama/Llama-3.1-70B": (8192, LLAMA),
    "meta-llama/Llama-3.3-70B-Instruct": (8192, LLAMA),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, QWEN),
    "Qwen/Qwen3-8B": (4096, QWEN),
    "Qwen/Qwen3-8B-Base": (4096, QWEN),
    "Qwen/Qwen3-30B-A3B": (2048, QWEN),
    "Qwen/Qwen3-30B-A3B-Base": (2048, QWEN),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (2048, QWEN),
    "Qwen/Qwen3-32B": (5120, QWEN),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (4096, QWEN),
}
"""Model of a Tinker service → its hidden size, and the exponent of its family."""


def default_learning_rate(base: str) -> float:
    """Return 5e-5 × 10 × (2000 / hidden size)^exponent; ValueError for any other base model.

    This rule of thumb for LoRA comes from Thinking Machines ("LoRA Without Regret",
    https://thinkingmachines.ai/blog/lora/), with the numbers of `get_lr` in the Tinker cookbook
    0.5.8. It was fitted to supervised training of Llama 3 and Qwen3, so a model of another family
    has no default. The rate has three significant digits, so that every machine computes the same
    recipe.
    """
    if base not in CALIBRATED:
        raise ValueError(
            f"there is no default learning rate for {base}, since the rule of thumb was calibrated "
            "on Llama 3 and Qwen3 alone (docs/algorithms.md); give optimizer.learning_rate"
        )
    hidden, exponent = CALIBRATED[base]
    return float(f"{FULL_TRAINING * LORA * (CALIBRATED_WIDTH / hidden) ** exponent:.3g}")


ScheduleName = Literal["constant", "linear", "cosine"]


class Optimizer(Section):
    """AdamW, as Tinker runs it, and its steps."""

    learning_rate: float | None = Field(default=None, gt=0, le=10)
    """Step size. A recipe without one takes the Tinker cookbook's rule of thumb for LoRA, by the
    base model's family and hidden size; for a model that the rule does not know, give one."""

    schedule: ScheduleName = "constant"
    """Curve by which the learning rate falls over the run's steps."""

    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps over which the learning rate rises, before it falls by the schedule."""

    final_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the learning rate towards which a linear or cosine schedule falls."""

    substeps: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps of each step, each on a part of its datums."""

    epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over the datums of a step."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""

    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Decoupled decay of the LoRA weights."""

    grad_clip_norm: float = Field(default=0.0, ge=0, le=1e6)
    """Gradients with a larger norm are scaled down to it; 0 leaves them."""

    requirements = (Needs("final_fraction", "schedule", ("linear", "cosine")),)

    def share(self, step: int, steps: int) -> float:
        """Return the share of the learning rate of a step, which counts from 0, of a run's `steps`.

        It rises linearly over the warm-up to 1, and falls by the schedule towards `final_fraction`,
        which it would reach at the step after the last.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        passed = (step - self.warmup_steps) / (steps - self.warmup_steps)
        left = {"constant": 1.0, "linear": 1 - passed, "cosine": (1 + cos(pi * passed)) / 2}
        return self.final_fraction + (1 - self.final_fraction) * left[self.schedule]


MEASURED = "held_out/"
"""Beginning of the names of what is measured on held-out examples."""
CONDITION = re.compile(
    rf"\s*(?P<metric>{MEASURED}\S+)\s*(?P<sign>>=|<=|>|<)\s*(?P<number>[-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*"
)
SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


class Stop(Section):
    """End of a run before its last step, by what is measured on held-out examples.

    The scores of a checkpoint are known to the run when its next step is trained, or
    2 · `rollouts.lag` steps later, and that step is then the last.
    """

    when: str | None = None
    """A condition on what is measured, `METRIC >= NUMBER` with one of >=, >, <=, <: such as
    `held_out/reward/mean >= 0.95` or `held_out/loss < 0.2` (docs/evaluation.md)."""

    patience: int = Field(default=0, ge=0, le=10_000)
    """Evaluations in turn without a gain over the best one before them; 0 waits for none."""

    @field_validator("when")
    @classmethod
    def _condition_is_one(cls, when: str | None) -> str | None:
        if when is not None and not CONDITION.fullmatch(when):
            raise ValueError(
                f"{when!r} is no condition; give METRIC, one of >=, >, <=, <, and a number, such "
                f"as {MEASURED}reward/mean >= 0.95"
            )
        return when

    @property
    def is_given(self) -> bool:
        """Whether a run may end early."""
        return self.when is not None or self.patience > 0

    def met(self, measured: Mapping[str, float], *, first: bool) -> str:
        """Say that the condition holds for what was measured; empty if it does not.

        UserError if the `first` evaluation does not measure what it is about.
        """
        found = CONDITION.fullmatch(self.when) if self.when is not None else None
        if found is None:
            return ""
        metric, sign, number = found.group("metric", "sign", "number")
        if (value := measured.get(metric)) is None:
            if first:
                raise UserError(
                    f"stop.when {self.when}: {metric} is not measured, but "
                    f"{', '.join(measured)}{did_you_mean(metric, measured)}"
                )
            return ""
        return f"{metric} {value:.4g} {sign} {number}" if SIGNS[sign](value, float(number)) else ""
