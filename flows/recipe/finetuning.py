"""The recipe of supervised learning on texts; its values stand in prefect.yaml."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, WithJsonSchema

from adapters.network.addresses import check_place
from flows.recipe.given_examples import Batches, HeldOutOrigin, Lengths
from flows.recipe.run_recipe import RunRecipe, Teachers
from tasks.algorithm.distillation import DISTILLATIONS, find_distillation
from tasks.examples.reading import Source
from tasks.examples.teaching import check_reads
from tasks.settings.run import HeldOut
from tasks.settings.section import Refusals, Section
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
    from tasks.recovery.recorded_steps import StepSource, TrainedPolicy
    from tasks.texts.chosen_rollouts import ChosenRollouts
    from tasks.texts.source import TextSource
    from tasks.update_method import UpdateMethod

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

    compares: str | None = None
    """Question of two answers, such as `Which answer is better?`: the rows are pairs, as those of
    `prefer`, and what is learnt is to say which is the chosen one, in both orders. The model can
    then be asked by `judge:pairs`, with that question (docs/judges.md)."""

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
        other = self.trained != "assistant" or any(one.query for one in self.origins().values())
        yield (
            self.compares is not None and other,
            "dataset.compares reads pairs of files, of which the verdict is trained; leave "
            "trained and queries out",
        )
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


class TextTeacher(Section):
    """A teacher whose likeliest tokens are learnt at each place of the texts, not the texts."""

    model: str | None = None
    """Teacher, of the policy's tokens: `RUN@STEP`, a checkpoint; `base`, the untrained model;
    another base model of the service, by a name with a slash; or `URL#MODEL`, a base model of
    another service, whose key is RATCHET_TEACHER_KEY."""

    top_k: int = Field(default=20, ge=1, le=1000)
    """Likeliest tokens that are learnt at a place; all others are one bucket."""

    divergence: Annotated[
        str,
        WithJsonSchema({"type": "string", "enum": [*DISTILLATIONS]}),
    ] = "forward_kl"
    """Divergence from the teacher that is lessened (docs/finetuning.md)."""

    reads: str | None = None
    """Text that the teacher reads before each conversation, as a system message, and the policy
    does not; `$column` is a column of the row."""

    def refusals(self) -> Refusals:
        find_distillation(self.divergence)
        if self.reads is not None:
            check_reads(self.reads)
        given = self.given(*TextTeacher.model_fields)
        yield (
            self.model is None and given != "",
            f"teacher without model ignores {given}; give teacher.model, or leave them out",
        )
        if self.model is not None and "://" in self.model:
            check_place(self.model)


class FinetuneRecipe(RunRecipe):
    """The recipe of `finetune`: supervised learning on texts."""

    flow: str = "finetune"
    """The flow that the recipe is for."""

    # What each section is for, its own docstring says.
    dataset: TextDataset
    batch: Batches = Batches()
    teacher: TextTeacher = TextTeacher()
    evaluation: HeldOut = HeldOut()

    loss: TextLoss = LOSS
    """Loss of each trained token: `cross_entropy`; `dft`, which weighs it by the token's
    probability p; or `phi`, by p (1 - p)."""

    def refusals(self) -> Refusals:
        yield from super().refusals()
        asked = [name for name, one in self.dataset.origins().items() if one.query is not None]
        yield (
            self.teacher.reads is not None and asked != [],
            "teacher.reads with dataset.query, whose rollouts are trained as they were sampled; "
            "leave it out, or give a file of conversations",
        )
        yield (
            self.teacher.model is not None and self.dataset.compares is not None,
            "teacher.model with dataset.compares, whose verdicts are known; leave one of them out",
        )
        yield (
            self.teacher.model is not None and self.loss != LOSS,
            f"loss {self.loss} does nothing with teacher.model, whose divergence is the loss; "
            "leave it out",
        )

    def holds_out(self) -> bool:
        return any(one.holds_out() for one in self.dataset.origins().values())

    def teachers(self) -> Teachers:
        teacher, none = self.teacher, dict[str, str]()
        models = none if teacher.model is None else {teacher.model: teacher.model}
        return Teachers("teacher.model", models, teacher.reads)

    def queried_runs(self) -> Iterator[str]:
        for one in self.dataset.origins().values():
            yield from one.runs

    def sources(self) -> dict[str, Source]:
        seed = self.evaluation.drawn_by(self.seed)
        return {
            _name(split, name): rows
            for name, one in self.dataset.origins().items()
            for split, rows in one.files(seed).items()
        }

    def given_examples(self) -> "dict[str, TextSource]":
        """Map the splits to the texts of each, or SPLIT/NAME to those of each source."""
        from tasks.pairs.verdicts import ComparedPairs
        from tasks.texts.source import WrittenTexts

        question = self.dataset.compares
        files = {
            name: WrittenTexts(rows) if question is None else ComparedPairs(rows, question)
            for name, rows in self.sources().items()
        }
        trained = self._chosen(TRAIN)
        held_out = self._chosen(TEST, tuple(trained.values()))
        named: dict[str, TextSource] = {**files, **trained, **held_out}
        return {name: named[name] for name in sorted(named, key=_is_held_out)}

    def read_by_teacher(self) -> "dict[str, TextSource]":
        """Map the sources to their texts as the teacher reads them."""
        from tasks.texts.source import WrittenTexts

        reads = self.teacher.reads
        return {name: WrittenTexts(rows, reads) for name, rows in self.sources().items()}

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
        return self.minimize(self.divergence() or self.loss, {})

    def divergence(self) -> str | None:
        """Return the divergence from the teacher that is lessened; None without a teacher."""
        return None if self.teacher.model is None else self.teacher.divergence

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: Eras[RunRecipe]
    ) -> "StepSource":
        """Return what restores the datums of the policy: the tokens of the texts."""
        from tasks.texts.batches import TextSteps

        batches = recipes.make(FinetuneRecipe, FinetuneRecipe.batches)
        taught = None if self.teacher.model is None else run.text_teacher
        return TextSteps(run.texts, run.datums, batches, taught)


def _name(split: str, source: str) -> str:
    return split if source == ALONE else f"{split}/{source}"


def _is_held_out(name: str) -> bool:
    return name.partition("/")[0] == TEST
