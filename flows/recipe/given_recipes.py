"""The recipes that learn texts (finetune) and preferences (prefer), and play nothing."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator

from ratchet.adapters.network.addresses import check_place
from ratchet.flows.recipe.given_examples import TOKENS, GivenDataset, GivenRecipe
from ratchet.flows.recipe.run_recipe import Teachers
from ratchet.tasks.algorithm.distillation import DISTILLATIONS, find_distillation
from ratchet.tasks.algorithm.preferences import (
    PREFERENCES,
    Preference,
    check_preference,
    find_preference,
)
from ratchet.tasks.examples.reading import Source, check_reads
from ratchet.tasks.settings.algorithm import BASE, SettingValue
from ratchet.tasks.settings.given import (
    ALONE,
    TEST,
    WHOLE,
    Batches,
    HeldOutOrigin,
    PairBatches,
    Shares,
    TextLoss,
    Trained,
)
from ratchet.tasks.settings.run import HeldOut, Optimizer
from ratchet.tasks.settings.section import OTHERS, Needs, Refusals, Section
from ratchet.tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:  # they import the SDK, which takes a while
    from ratchet.tasks.datums import UpdateMethod
    from ratchet.tasks.given.given import GivenSource
    from ratchet.tasks.given.pairs import BoundPairs, WrittenPairs
    from ratchet.tasks.given.selections import ChosenPairs, ChosenRollouts
    from ratchet.tasks.given.texts import Texts

LOSS: TextLoss = "cross_entropy"


class TextShare(HeldOutOrigin):
    """Texts that are one of several sources."""

    share: int = Field(default=1, ge=1, le=1000)
    """Its part of every batch: how many of the sum of all shares are its own."""


class TextDataset(GivenDataset):
    """Texts that the model learns to write: of one source, or of several.

    A row has `messages`, or a `prompt` and its `completion`, or a `text`; a query has the columns
    `run` and `rollout_id` (docs/methods.md).
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
        return dict(sorted(self.sources.items())) or {ALONE: self}

    def shares(self) -> Shares:
        return tuple((name, one.share) for name, one in sorted(self.sources.items())) or WHOLE


class TextTeacher(Section):
    """A teacher whose likeliest tokens are learnt at each place of the texts, not the texts."""

    model: str | None = None
    """Teacher, of the policy's tokens: `RUN@STEP`, a checkpoint; `base`, the untrained model;
    another base model of the service, by a name with a slash; or `URL#MODEL`, a base model of
    another service, or one of a server such as vLLM, whose key is RATCHET_TEACHER_KEY."""

    top_k: int = Field(default=20, ge=1, le=1000)
    """Likeliest tokens that are learnt at a place; all others are one bucket."""

    divergence: Annotated[str, WithJsonSchema({"type": "string", "enum": [*DISTILLATIONS]})] = (
        "forward_kl"
    )
    """Divergence from the teacher that is lessened (docs/methods.md)."""

    reads: str | None = None
    """Text that the teacher reads before each conversation, as a system message, and the policy
    does not; `$column` is a column of the row."""

    requirements = (Needs(OTHERS, "model"),)

    def refusals(self) -> Refusals:
        find_distillation(self.divergence)
        if self.reads is not None:
            check_reads(self.reads)
        if self.model is not None and "://" in self.model:
            check_place(self.model)
        yield from ()


class FinetuneRecipe(GivenRecipe):
    """The recipe of `finetune`: supervised learning on texts."""

    flow: str = "finetune"
    """The flow that the recipe is for."""

    # What each section is for, its own docstring says.
    dataset: TextDataset  # pyright: ignore[reportIncompatibleVariableOverride]
    batch: Batches = Batches()  # pyright: ignore[reportIncompatibleVariableOverride]
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

    def measures(self) -> list[str]:
        return ["loss"]

    def teachers(self) -> Teachers:
        teacher, none = self.teacher, dict[str, str]()
        models = none if teacher.model is None else {teacher.model: teacher.model}
        return Teachers("teacher.model", models, teacher.reads, likeliest=teacher.top_k)

    def units(self, run: RunFolder) -> "Texts":
        from ratchet.tasks.given.texts import Texts

        taught = None if self.teacher.model is None else run.text_teacher
        return Texts(run.texts, taught, self.divergence())

    def written(self, rows: Source) -> "GivenSource":
        from ratchet.tasks.given.pairs import ComparedPairs
        from ratchet.tasks.given.texts import WrittenTexts

        question = self.dataset.compares
        if question is not None:
            return ComparedPairs(rows, question)
        return WrittenTexts(rows, self.dataset.trained)

    @property
    def chosen(self) -> "type[ChosenRollouts]":
        from ratchet.tasks.given.selections import ChosenRollouts

        return ChosenRollouts

    def read_by_teacher(self) -> "dict[str, GivenSource]":
        """Map the sources to their texts as the teacher reads them."""
        from ratchet.tasks.given.texts import WrittenTexts

        trained, reads = self.dataset.trained, self.teacher.reads
        return {name: WrittenTexts(rows, trained, reads) for name, rows in self.sources().items()}

    def update_method(self) -> "UpdateMethod":
        return self.minimize(self.divergence() or self.loss, {})

    def divergence(self) -> str | None:
        """Return the divergence from the teacher that is lessened; None without a teacher."""
        return None if self.teacher.model is None else self.teacher.divergence


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

    def scored_by(self) -> Iterator[str]:
        yield from super().scored_by()
        if self.scores_units():
            yield f"preference.reference {self.preference.reference}"

    def scores_units(self) -> bool:
        return self.preference.row().reference

    def compared_by(self) -> dict[str, Any]:
        """Map the keys by which the sides of held-out pairs are compared, and with which reference.

        All losses of pairs that have a reference compare alike, and so do all without one, by sums
        or by token; labelled answers are compared with the loss's z.
        """
        reference, row = self.preference.reference, self.preference.row()
        by = f"log p{' - log ref' * row.reference}{' by token' * row.by_token}"
        held_out = self.sources().get(TEST) if row.mismatched else None
        labelled = row.mismatched and (  # and so may be what a query chooses
            held_out is None or any("completion" in one["example"] for one in held_out.examples())
        )
        by += " - z" * labelled
        if not row.reference:
            return {"preference": {"loss": by}}
        weights = TOKENS | ({"start"} if reference == START else set())
        return {
            "preference": {"loss": by, "reference": reference},
            "model": self.model.model_dump(include=weights),
        }

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
