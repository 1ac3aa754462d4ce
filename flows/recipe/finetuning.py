"""The recipe of supervised learning on texts; its values stand in prefect.yaml."""

from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flows.recipe.given_examples import Batches, HeldOutOrigin, Lengths, without_columns
from flows.recipe.run_recipe import HeldOut, RunRecipe
from flows.recipe.section import Refusals
from tasks.examples.reading import Source
from tasks.storage.manifest import Eras
from tasks.storage.run_folder import RunFolder
from tasks.texts.rules import (
    ALONE,
    TEST,
    TRAIN,
    WHOLE,
    Shares,
    TextBatch,
    TextLoss,
    TextRules,
    Trained,
)

if TYPE_CHECKING:  # they import torch, which takes seconds
    from tasks.algorithm.update_method import UpdateMethod
    from tasks.recovery.recorded_steps import StepSource, TrainedPolicy
    from tasks.texts.chosen_rollouts import ChosenRollouts
    from tasks.texts.source import TextSource

LOSS: TextLoss = "cross_entropy"


class TextShare(HeldOutOrigin):
    """Texts that are one of several sources."""

    share: int = Field(default=1, ge=1, le=1000)
    """Its part of every batch: how many of the sum of all shares are its own."""


class TextDataset(HeldOutOrigin, Lengths):
    """Texts that the model learns to write: of one source, or of several.

    A row has `messages`, or a `prompt` and its `completion`, or a `text`; a query has the columns
    `run` and `rollout_id` (docs/finetuning.md).
    """

    sources: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], TextShare] = Field(
        default_factory=dict[str, TextShare]
    )
    """Several sources instead, by names of your own: each has a path or a query as above, and the
    `share` of every batch that is its own, such as {chat: {path: a.jsonl, share: 3}, code: {path:
    b.jsonl, share: 1}}."""

    trained: Trained = "assistant"
    """Part of a conversation that is trained: the last answer, the answers after the last message
    of a user, every answer, those that are marked by `trainable`, or every token."""

    def refusals(self) -> Refusals:
        given = self.given(*HeldOutOrigin.model_fields)
        if self.sources:
            yield (
                given != "",
                f"sources {', '.join(self.sources)} with {given}: each source has its "
                "own; leave the dataset's out",
            )
        else:
            yield from super().refusals()
        yield (
            self.trained != "assistant" and all(one.query for one in self.origins().values()),
            f"trained {self.trained} does nothing with a query, which trains what was sampled; "
            "leave it out",
        )

    def origins(self) -> Mapping[str, HeldOutOrigin]:
        """Map the names of the sources, in their order, to where their texts are."""
        return dict(sorted(self.sources.items())) or {ALONE: self}

    def shares(self) -> Shares:
        """List the sources with the share of each."""
        return tuple((name, one.share) for name, one in sorted(self.sources.items())) or WHOLE


class FinetuneRecipe(RunRecipe):
    """The recipe of `finetune`: supervised learning on texts."""

    flow: str = "finetune"
    """The flow that the recipe is for."""

    # What each section is for, its own docstring says.
    dataset: TextDataset
    batch: Batches = Batches()
    evaluation: HeldOut = HeldOut()

    loss: TextLoss = LOSS
    """Loss of each trained token: `cross_entropy`; `dft`, which weighs it by the token's
    probability p; or `phi`, by p (1 - p)."""

    def _bound_values(self) -> dict[str, Any]:
        values = without_columns(super()._bound_values())
        if self.loss == LOSS:
            del values["loss"]  # recipes that are older do not have the key
        return values

    def sources(self) -> dict[str, Source]:
        return {
            _name(split, name): rows
            for name, one in self.dataset.origins().items()
            for split, rows in one.files().items()
        }

    def given_examples(self) -> "dict[str, TextSource]":
        """Map the splits to the texts of each, or SPLIT/NAME to those of each source."""
        from tasks.texts.source import WrittenTexts

        files = {name: WrittenTexts(rows) for name, rows in self.sources().items()}
        trained = self._chosen(TRAIN)
        held_out = self._chosen(TEST, tuple(trained.values()))
        named: dict[str, TextSource] = {**files, **trained, **held_out}
        return {name: named[name] for name in sorted(named, key=_is_held_out)}

    def _chosen(
        self, split: str, apart: "tuple[ChosenRollouts, ...]" = ()
    ) -> "dict[str, ChosenRollouts]":
        """Map the sources of a split to what their queries choose."""
        from tasks.texts.chosen_rollouts import ChosenRollouts

        chosen: dict[str, ChosenRollouts] = {}
        for name, one in self.dataset.origins().items():
            where = "dataset" if name == ALONE else f"dataset.sources.{name}"
            if query := one.queries(self.model.base, where).get(split):
                chosen[_name(split, name)] = ChosenRollouts(query, apart)
        return chosen

    def steps_of(self, epochs: float) -> int:
        """Return the steps whose batches are so many passes over the training texts.

        With several sources these are the texts of all of them.
        """
        texts = sum(len(of) for name, of in self.given_examples().items() if not _is_held_out(name))
        return ceil(Fraction(str(epochs)) * texts / self.batch.examples)

    def rules(self) -> TextRules:
        return TextRules(self.dataset.trained, self.dataset.most_tokens, self.dataset.too_long)

    def batches(self) -> TextBatch:
        batch = self.batch
        shares = self.dataset.shares()
        return TextBatch(batch.examples, self.seed, batch.normalisation, batch.divisor, shares)

    def update_method(self) -> "UpdateMethod":
        return self.optimizer.method(self.loss, {}, self.steps)

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: Eras[RunRecipe]
    ) -> "StepSource":
        """Return what restores the datums of the policy: the tokens of the texts."""
        from tasks.texts.batches import TextSteps

        return TextSteps(
            run.texts, run.datums, recipes.make(FinetuneRecipe, FinetuneRecipe.batches)
        )


def _name(split: str, source: str) -> str:
    return split if source == ALONE else f"{split}/{source}"


def _is_held_out(name: str) -> bool:
    return name.partition("/")[0] == TEST
