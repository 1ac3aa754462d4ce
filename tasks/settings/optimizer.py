"""The section of a recipe about its optimizer."""

from math import cos, pi
from typing import Literal

from pydantic import Field

from ratchet.tasks.settings.section import MOST_STEPS, Needs, Section

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
