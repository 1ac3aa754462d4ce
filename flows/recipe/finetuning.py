"""The recipe of supervised learning on texts; its values stand in prefect.yaml."""

from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from adapters.project.hub import locate_dataset
from flows.recipe.run_recipe import HeldOut, RunRecipe
from flows.recipe.section import MOST_ROLLOUTS, Refusals, Section
from tasks.examples.reading import Source
from tasks.storage.manifest import Eras
from tasks.storage.run_folder import RunFolder, folder_of
from tasks.texts.rules import (
    ALONE,
    TEST,
    TRAIN,
    WHOLE,
    Normalisation,
    Shares,
    TextBatch,
    TextRules,
    TooLong,
    Trained,
)

if TYPE_CHECKING:  # they import torch, which takes seconds
    from tasks.algorithm.update_method import UpdateMethod
    from tasks.recovery.recorded_steps import StepSource, TrainedPolicy
    from tasks.texts.chosen_rollouts import ChosenRollouts, RolloutQuery
    from tasks.texts.source import TextSource

LOSS = "cross_entropy"


class Origin(Section):
    """Examples that a model learns and does not play: rows of a file, or rollouts of a query."""

    path: str | None = None
    """A CSV, JSON-lines or Parquet file whose `split` column says train or test; a folder of files
    that are named train and test; or such a folder of the hub."""

    test_split: str = "test"
    """The split that is held out, where its name is another, such as validation."""

    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """Columns that have other names in the file, such as {messages: conversations}."""

    runs: tuple[str, ...] = ()
    """Runs that a query reads, instead of a path."""

    query: str | None = None
    """A SELECT over the views of those runs (docs/sql.md), whose columns name rollouts: their
    tokens are trained as they were sampled."""

    held_out: str | None = None
    """Such a query of what is held out."""

    def refusals(self) -> Refusals:
        asked = {"runs": self.runs != (), "query": self.query, "held_out": self.held_out}
        given = [name for name, value in asked.items() if value]
        either = bool(given) != bool(self.path) and len(given) in (0, len(asked))
        yield (
            not either,
            f"path {self.path} with {', '.join(given) or 'no query'}: examples are of a file or of "
            "rollouts; give path alone, or runs, query and held_out",
        )
        yield (
            self.query is not None and self.test_split != "test",
            f"test_split {self.test_split} does nothing with a query; leave it out",
        )
        yield (
            self.query is not None and self.columns != {},
            f"columns {', '.join(self.columns)} do nothing with a query; leave them out",
        )

    def files(self) -> dict[str, Source]:
        """Map the splits to the rows of each, if they are of a file."""
        if self.path is None:
            return {}
        path, renamed = locate_dataset(self.path), tuple(sorted(self.columns.items()))
        splits = {TRAIN: TRAIN, TEST: self.test_split}
        return {
            split: Source(path, named, tuple(self.columns.values()), renamed=renamed)
            for split, named in splits.items()
        }

    def queries(self, base: str, where: str = "dataset") -> "dict[str, RolloutQuery]":
        """Map the splits to the query of each, if they are of runs, whose models are of `base`.

        The keys of the queries are `where` in the recipe.
        """
        from tasks.texts.chosen_rollouts import RolloutQuery

        runs = tuple(folder_of(name) for name in self.runs)
        asked = {TRAIN: ("query", self.query), TEST: ("held_out", self.held_out)}
        return {
            split: RolloutQuery(runs, f"{where}.{key}", query, base)
            for split, (key, query) in asked.items()
            if query is not None
        }


class TextShare(Origin):
    """Texts that are one of several sources."""

    share: int = Field(default=1, ge=1, le=1000)
    """Its part of every batch: how many of the sum of all shares are its own."""


class TextDataset(Origin):
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

    most_tokens: int = Field(default=2048, ge=2, le=10**7)
    """The longest text, in tokens."""

    too_long: TooLong = "refuse"
    """What becomes of a longer text: the run is refused, its end is cut off, or it is left out."""

    def refusals(self) -> Refusals:
        fields = Origin.model_fields
        given = [name for name in fields if getattr(self, name) != fields[name].default]
        if self.sources:
            yield (
                bool(given),
                f"sources {', '.join(self.sources)} with {', '.join(given)}: each source has its "
                "own; leave the dataset's out",
            )
        else:
            yield from super().refusals()
        yield (
            self.trained != "assistant" and all(one.query for one in self.origins().values()),
            f"trained {self.trained} does nothing with a query, which trains what was sampled; "
            "leave it out",
        )

    def origins(self) -> Mapping[str, Origin]:
        """Map the names of the sources, in their order, to where their texts are."""
        return dict(sorted(self.sources.items())) or {ALONE: self}

    def shares(self) -> Shares:
        """List the sources with the share of each."""
        return tuple((name, one.share) for name, one in sorted(self.sources.items())) or WHOLE


class Batches(Section):
    """Texts of a step, and the divisor of their loss."""

    examples: int = Field(default=16, ge=1, le=MOST_ROLLOUTS)
    """Texts of a step."""

    normalisation: Normalisation = "token"
    """Divisor of a step's loss: its trained `token`s; each `example`'s tokens, and the examples; or
    a `fixed` number."""

    divisor: float | None = Field(default=None, gt=0, le=1e12)
    """The divisor of normalisation `fixed`."""

    def refusals(self) -> Refusals:
        yield (
            (self.normalisation == "fixed") != (self.divisor is not None),
            f"normalisation {self.normalisation} with divisor {self.divisor}: one without the "
            "other does nothing; give normalisation fixed and a divisor, or neither",
        )


class FinetuneRecipe(RunRecipe):
    """The recipe of `finetune`: supervised learning on texts."""

    flow: str = "finetune"
    """The flow that the recipe is for."""

    # What each section is for, its own docstring says.
    dataset: TextDataset
    batch: Batches = Batches()
    evaluation: HeldOut = HeldOut()

    def sources(self) -> dict[str, Source]:
        return {
            _name(split, name): rows
            for name, one in self.dataset.origins().items()
            for split, rows in one.files().items()
        }

    def _bound_values(self) -> dict[str, Any]:
        return without_columns(super()._bound_values())

    def texts(self) -> "dict[str, TextSource]":
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
        texts = sum(len(of) for name, of in self.texts().items() if not _is_held_out(name))
        return ceil(Fraction(str(epochs)) * texts / self.batch.examples)

    def rules(self) -> TextRules:
        return TextRules(self.dataset.trained, self.dataset.most_tokens, self.dataset.too_long)

    def batches(self) -> TextBatch:
        batch = self.batch
        shares = self.dataset.shares()
        return TextBatch(batch.examples, self.seed, batch.normalisation, batch.divisor, shares)

    def update_method(self) -> "UpdateMethod":
        return self.optimizer.method(LOSS, {}, self.steps)

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: Eras[RunRecipe]
    ) -> "StepSource":
        """Return what restores the datums of the policy: the tokens of the texts."""
        from tasks.texts.batches import TextSteps

        return TextSteps(run, recipes.make(FinetuneRecipe, FinetuneRecipe.batches))


def without_columns(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the columns that have their own names, as in recipes older than the key."""
    for origin in (values["dataset"], *values["dataset"].get("sources", {}).values()):
        if not origin["columns"]:
            del origin["columns"]
    return values


def _name(split: str, source: str) -> str:
    return split if source == ALONE else f"{split}/{source}"


def _is_held_out(name: str) -> bool:
    return name.partition("/")[0] == TEST
