"""The recipe of learning from preferences; its values stand in prefect.yaml."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, WithJsonSchema, field_validator

from flows.recipe.algorithm import BASE, SettingValue
from flows.recipe.given_examples import HeldOutOrigin, Lengths
from flows.recipe.run_recipe import RunRecipe
from tasks.algorithm.preferences import (
    PREFERENCES,
    Preference,
    check_preference,
    find_preference,
)
from tasks.examples.reading import Source
from tasks.settings.optimizer import Optimizer
from tasks.settings.run import HeldOut
from tasks.settings.section import MOST_ROLLOUTS, Refusals, Section
from tasks.storage.manifest import Eras
from tasks.storage.run_folder import RunFolder
from tasks.texts.rules import TextRules

if TYPE_CHECKING:  # they import torch, which takes seconds
    from tasks.pairs.batches import PairBatch
    from tasks.pairs.source import PairSource
    from tasks.recovery.recorded_steps import StepSource, TrainedPolicy
    from tasks.update_method import UpdateMethod

START = "start"
"""The weights that the run starts with, as the reference."""

LEARNING_RATE = 1e-5
"""Step size of a recipe without one: that of the Tinker cookbook's DPO."""


class PairDataset(HeldOutOrigin, Lengths):
    """Pairs of answers, of which one is preferred: of a file, or rollouts that a query chooses.

    A row has `prompt`, `chosen` and `rejected`, or the last two alone, or a `comparison` and its
    `label`; a query has the columns `run`, `chosen` and `rejected`. For the losses of labelled
    answers a row has `prompt`, `completion` and `label`, a query `run`, `rollout_id` and `label`
    (docs/preferences.md).
    """


class PairBatches(Section):
    """Pairs of a step, whose loss is the mean over them."""

    pairs: int = Field(default=16, ge=1, le=MOST_ROLLOUTS)
    """Pairs of a step, or labelled answers."""


class PreferenceMethod(Section):
    """Path from the two sides of a pair to a loss."""

    loss: Annotated[str, WithJsonSchema({"type": "string", "enum": [*PREFERENCES]})] = "dpo"
    """Loss, by name (docs/preferences.md)."""

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


class PreferRecipe(RunRecipe):
    """The recipe of `prefer`: learning from pairs of answers, of which one is preferred."""

    flow: str = "prefer"
    """The flow that the recipe is for."""

    # What each section is for, its own docstring says.
    dataset: PairDataset
    batch: PairBatches = PairBatches()
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

    def sources(self) -> dict[str, Source]:
        return self.dataset.files(self.evaluation.drawn_by(self.seed))

    def holds_out(self) -> bool:
        return self.dataset.holds_out()

    def queried_runs(self) -> Iterator[str]:
        yield from self.dataset.runs

    def given_examples(self) -> "dict[str, PairSource]":
        """Map the splits to the pairs of each."""
        from tasks.pairs.chosen_pairs import ChosenPairs
        from tasks.pairs.source import WrittenPairs

        chosen: dict[str, ChosenPairs] = {}
        for split, query in self.dataset.queries(self.model.base).items():
            chosen[split] = ChosenPairs(query, tuple(chosen.values()))
        written = {split: WrittenPairs(rows) for split, rows in self.sources().items()}
        return {**written, **chosen}

    def steps_of(self, epochs: float) -> int:
        """Return the steps whose batches are so many passes over the training pairs."""
        pairs = len(self.given_examples()["train"])
        return ceil(Fraction(str(epochs)) * pairs / self.batch.pairs)

    def rules(self) -> TextRules:
        return TextRules("marked", self.dataset.most_tokens, self.dataset.too_long)

    def batches(self) -> "PairBatch":
        from tasks.pairs.batches import PairBatch

        return PairBatch(self.batch.pairs, self.seed)

    def named_checkpoints(self) -> dict[str, str]:
        reference = self.preference.reference
        named = self.preference.names_checkpoint()
        own = {reference: "preference.reference"} if named else {}
        return own | super().named_checkpoints()

    def update_method(self) -> "UpdateMethod":
        method = self.preference
        return self.minimize(method.loss, method.loss_settings)

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: Eras[RunRecipe]
    ) -> "StepSource":
        """Return what restores the datums of the policy: the tokens of the pairs."""
        from tasks.pairs.batches import PairSteps

        batches = recipes.make(PreferRecipe, PreferRecipe.batches)
        return PairSteps(run, batches, self.preference.row().reference)
