"""The section of a recipe that says what an expert's texts add to rollouts, as MIX and CHORD do."""

from typing import TYPE_CHECKING

from pydantic import Field

from tasks.algorithm.learning_rates import MixingSchedule
from tasks.settings.given import TRAIN, Batches, Lengths, Origin, TextLoss, Trained
from tasks.settings.section import MOST_STEPS, Refusals

if TYPE_CHECKING:  # they import torch, which takes seconds
    from tasks.given.given import Drawing, GivenSource
    from tasks.update_method import ExpertTerm

WHERE = "algorithm.expert"


class Expert(Origin, Batches, Lengths):
    """Texts of an expert that are trained beside the rollouts of each step, as MIX and CHORD do.

    The loss of a step is (1 - µ) times that of its rollouts, plus µ times that of its texts, each
    divided by its own denominator. The texts are those of the split train, or what a query chooses.
    """

    loss: TextLoss = "cross_entropy"
    """Loss of their tokens: `cross_entropy`, as in MIX; `phi`, which weighs it by p (1 - p) of each
    token, as in CHORD; or `dft`, by p."""

    share: float = Field(default=0.1, gt=0, lt=1)
    """Share µ of their loss or, if it changes, its largest."""

    final_share: float | None = Field(default=None, ge=0, lt=1)
    """Share to which µ falls by a cosine; empty keeps it."""

    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps over which µ rises from 0, before it falls."""

    decay_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps over which µ falls to `final_share`."""

    trained: Trained = "assistant"
    """Part of a conversation that is trained (docs/finetuning.md)."""

    @property
    def given_texts(self) -> bool:
        """Whether the recipe has an expert."""
        return self.path is not None or self.query is not None

    def refusals(self) -> Refusals:
        given = self.given(*Expert.model_fields)
        if not given:
            return
        yield (
            not self.given_texts,
            f"{WHERE} without texts ignores {given}; give {WHERE}.path, or runs and query, or "
            "leave them out",
        )
        yield from super().refusals()
        yield (
            (self.final_share is None) != (self.decay_steps == 0),
            f"{WHERE}.final_share {self.final_share} with decay_steps {self.decay_steps}: one "
            "without the other does nothing; give both, or neither",
        )
        yield (
            self.trained != "assistant" and self.query is not None,
            f"{WHERE}.trained {self.trained} does nothing with a query, which trains what was "
            "sampled; leave it out",
        )

    def texts(self, base: str) -> "dict[str, GivenSource]":
        """Map the split that is trained to its texts."""
        from tasks.given.chosen import ChosenRollouts, queries_of
        from tasks.given.texts import WrittenTexts

        if queries := queries_of(self, base, WHERE):
            return {TRAIN: ChosenRollouts(queries[TRAIN])}
        return {TRAIN: WrittenTexts(self.files()[TRAIN], self.trained)}

    def drawing(self, seed: int) -> "Drawing":
        from tasks.given.given import Drawing

        return Drawing(self, seed)

    def term(self) -> "ExpertTerm | None":
        """Return the term of a step's loss, None without an expert."""
        if not self.given_texts:
            return None
        from tasks.update_method import ExpertTerm

        valley = self.share if self.final_share is None else self.final_share
        schedule = MixingSchedule(self.share, valley, self.warmup_steps, self.decay_steps)
        return ExpertTerm(self.loss, schedule)
