"""The base class of a recipe's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the recipe: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
