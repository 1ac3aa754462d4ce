"""The base class of a recipe's sections."""

from pydantic import BaseModel, ConfigDict

MOST_STEPS = 10_000_000
MOST_ROLLOUTS = 1_000_000
"""The most rollouts of a step, and of an evaluation: more cannot be meant."""
TABLES = ("roles", "algorithm.loss_settings", "algorithm.advantage_settings")
"""Keys of a recipe whose entries have names of their own."""
LONGEST_SECONDS = 30 * 24 * 3600


class Section(BaseModel):
    """A part of the recipe: frozen; an unknown key, or a number that is not finite, is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
