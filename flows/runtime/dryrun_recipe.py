"""A recipe → the same, small enough to look at, and answered on this machine alone."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from adapters.door.roles import policy_of
from adapters.errors import UserError
from flows.recipe import Model, Recipe, Tracking

LOCAL = "local/"
SCRIPTED = "function:"


class DryRun(BaseModel):
    """What became of a dry run."""

    model_config = ConfigDict(frozen=True)

    rollouts: int
    failed: int
    report: str


class OfflineError(UserError):
    """The recipe needs a network."""


def rehearsed(recipe: Recipe, examples: int) -> Recipe:
    """The recipe of a dry run: `examples` of them, two rollouts each, in this process."""
    rollouts = recipe.rollouts.model_copy(
        update={"groups": examples, "group_size": 2, "minimum_group": 2, "where": "here"}
    )
    return recipe.model_copy(update={"steps": 1, "rollouts": rollouts, "tracking": Tracking()})


def offline(recipe: Recipe) -> Recipe:
    """The recipe with the tiny model, unless its own is a folder; roles must be scripted."""
    for role, answerer in recipe.roles.items():
        if policy_of(answerer) is None and not answerer.startswith(SCRIPTED):
            raise OfflineError(
                f"the role {role} is answered by {answerer}, which needs a network: allow it by "
                f'--online, or script it by --set \'roles={{"{role}": "{SCRIPTED}module:name"}}\''
            )
    if recipe.model.base.startswith(LOCAL) or Path(recipe.model.base).is_dir():
        return recipe
    tiny = {"base": Model().base, "renderer": Model().renderer}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=tiny)})


def without_service() -> None:
    """Let this process know of no Tinker service but an engine of its own."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        os.environ.pop(name, None)
