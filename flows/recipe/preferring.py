"""The recipe of learning from preferences; its values stand in prefect.yaml."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator

from ratchet.flows.recipe.given_examples import TOKENS, GivenDataset, GivenRecipe
from ratchet.tasks.algorithm.preferences import (
    PREFERENCES,
    Preference,
    check_preference,
    find_preference,
)
from ratchet.tasks.examples.reading import Source
from ratchet.tasks.settings.algorithm import BASE, SettingValue
from ratchet.tasks.settings.given import TEST, PairBatches
from ratchet.tasks.settings.optimizer import Optimizer
from ratchet.tasks.settings.run import HeldOut
from ratchet.tasks.settings.section import Refusals, Section
from ratchet.tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:  # they import torch, which takes seconds
    from ratchet.tasks.datums import UpdateMethod
    from ratchet.tasks.given.pairs import BoundPairs, WrittenPairs
    from ratchet.tasks.given.selections import ChosenPairs

START = "start"
"""The weights that the run starts with, as the reference."""

LEARNING_RATE = 1e-5
"""Step size of a recipe without one: that of the Tinker cookbook's DPO."""


class PairDataset(GivenDataset):
    """Pairs of answers, of which one is preferred: of a file, or rollouts that a query chooses.

    A row has `prompt`, `chosen` and `rejected`, or the last two alone, or a `comparison` and its
    `label`; a query has the columns `run`, `chosen` and `rejected`. For the losses of labelled
    answers a row has `prompt`, `completion` and `label`, a query `run`, `rollout_id` and `label`
    (docs/methods.md).
    """


class PreferenceMethod(Section):
    """Path from the two sides of a pair to a loss."""

    loss: Annotated[str, WithJsonSchema({"type": "string", "enum": [*PREFERENCES]})] = "dpo"
    """Loss, by name (docs/methods.md)."""

    loss_settings: dict[str, SettingValue] = Field(default_factory=dict[str, SettingValue])
    """The loss's own settings, such as dpo's beta; one it does not read is refused."""

    reference: str = START
    """Policy that the loss compares with: `start`, the weights of checkpoint 0; `base`, the
    untrained model; or `RUN@STEP`, a checkpoint. It never changes, and scores each side once."""

    def refusals(self) -> Refusals:
        check_preference(self.loss, self.loss_settings)
        yield (
            self.reference != START and not self.row().reference,
            f"preference.reference {self.reference} does nothing with preference.loss {self.loss}, "
            "which has no reference; leave it out, or give another loss",
        )

    def row(self) -> Preference:
        """Return the row of the loss in its table."""
        return find_preference(self.loss)

    def names_checkpoint(self) -> bool:
        return self.reference not in (START, BASE)


class PreferRecipe(GivenRecipe):
    """The recipe of `prefer`: learning from pairs of answers, of which one is preferred."""

    flow: str = "prefer"
    """The flow that the recipe is for."""

    # What each section is for, its own docstring says.
    dataset: PairDataset  # pyright: ignore[reportIncompatibleVariableOverride]
    batch: PairBatches = PairBatches()  # pyright: ignore[reportIncompatibleVariableOverride]
    preference: PreferenceMethod = PreferenceMethod()
    evaluation: HeldOut = HeldOut()

    @field_validator("optimizer", mode="before")
    @classmethod
    def _learning_rate_is_small(cls, optimizer: object) -> object:
        values = optimizer.model_dump() if isinstance(optimizer, Optimizer) else optimizer
        if not isinstance(values, dict):
            return values
        rate = values.get("learning_rate")
        return {**values, "learning_rate": LEARNING_RATE if rate is None else rate}

    def refusals(self) -> Refusals:
        yield from super().refusals()
        substeps, pairs = self.optimizer.substeps, self.batch.pairs
        yield (
            substeps > pairs,
            f"optimizer.substeps {substeps} with batch.pairs {pairs}: a pair is never split; give "
            "at most as many substeps as pairs",
        )

    def measures(self) -> list[str]:
        return ["accuracy"]

    def compared_by(self) -> dict[str, Any]:
        """Map the keys by which the sides of held-out pairs are compared, and with which reference.

        All losses of pairs that have a reference compare alike, and so do all without one, by sums
        or by token; labelled answers are compared with the loss's z.
        """
        reference, row = self.preference.reference, self.preference.row()
        by = f"log p{' - log ref' * row.reference}{' by token' * row.by_token}"
        by += " - z" * (row.mismatched and self._may_be_labelled())
        if not row.reference:
            return {"preference": {"loss": by}}
        weights = TOKENS | ({"start"} if reference == START else set())
        return {
            "preference": {"loss": by, "reference": reference},
            "model": self.model.model_dump(include=weights),
        }

    def _may_be_labelled(self) -> bool:
        """Return whether held-out answers are labelled; what a query chooses may be."""
        held_out = self.sources().get(TEST)
        return held_out is None or any(
            "completion" in row["example"] for row in held_out.examples()
        )

    def units(self, run: RunFolder) -> "BoundPairs":
        from ratchet.tasks.given.pairs import BoundPairs

        method = self.preference
        references = run.pair_references if method.row().reference else None
        loss = (method.loss, method.loss_settings)
        return BoundPairs(run.pairs, loss, references, from_start=method.reference == START)

    def written(self, rows: Source) -> "WrittenPairs":
        from ratchet.tasks.given.pairs import WrittenPairs

        return WrittenPairs(rows)

    @property
    def chosen(self) -> "type[ChosenPairs]":
        from ratchet.tasks.given.selections import ChosenPairs

        return ChosenPairs

    def named_checkpoints(self) -> dict[str, str]:
        reference = self.preference.reference
        named = self.preference.names_checkpoint()
        own = {reference: "preference.reference"} if named else {}
        return own | super().named_checkpoints()

    def update_method(self) -> "UpdateMethod":
        method = self.preference
        return self.minimize(method.loss, method.loss_settings)
