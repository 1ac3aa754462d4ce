"""The sections of what a run is given to learn: where it is, how long it may be, its batches."""

from dataclasses import replace
from math import cos, pi
from typing import Annotated, Literal

from pydantic import Field

from ratchet.adapters.project.hub import locate_dataset
from ratchet.tasks.examples.reading import Division, Source
from ratchet.tasks.settings.section import MOST_ROLLOUTS, MOST_STEPS, Needs, Refusals, Section

Trained = Literal["last_message", "last_turn", "assistant", "marked", "all"]
"""Part of a conversation that is trained."""

TooLong = Literal["refuse", "cut", "leave_out"]
"""Treatment of a text with too many tokens."""

Normalisation = Literal["token", "example", "fixed"]
"""Divisor of a step's loss: its trained tokens, each example's and the examples, or a number."""

TextLoss = Literal["cross_entropy", "dft", "phi"]
"""Losses of texts, which are rows of `tasks.algorithm.losses.LOSSES`."""

TRAIN, TEST = "train", "test"
"""Splits, however a file calls the second one."""

ALONE = ""
"""Name of a source that is the only one."""

Shares = tuple[tuple[str, int], ...]
WHOLE: Shares = ((ALONE, 1),)

EXPERT = "algorithm.expert"
"""Key of the section of an expert's texts."""

DEFAULT_SHARE = 0.1
"""Share of a file without splits that is held out."""

Share = Annotated[float, Field(ge=0, lt=1)]


class Splits(Section):
    """Splits of a data set: the rows that are trained, and those that are held out."""

    test_split: str = "test"
    """The split that is held out, where its name is another, such as validation."""

    splits: tuple[str, ...] = ()
    """The names of both splits, where the first one has another as well, such as [train_sft,
    test_sft]; the first alone with a share as `held_out`."""

    def refusals(self) -> Refusals:
        yield from super().refusals()
        needed = 1 if self.held_out_share() is not None else 2
        yield (
            self.splits != () and self.test_split != TEST,
            f"test_split {self.test_split} with splits {', '.join(self.splits)}, which name it; "
            "leave test_split out",
        )
        yield (
            self.splits != () and len({*self.splits}) != needed,
            f"splits {', '.join(self.splits)}: give the names of two, the trained one first; or, "
            "with a share as held_out, that of the first alone",
        )

    def held_out_share(self) -> float | None:
        """Return the share that is held out of a set without splits, if the recipe gives it."""
        return None

    def holds_out(self) -> bool:
        """Return whether there is anything on which a run is measured."""
        return self.held_out_share() != 0

    def sides(self, whole: Source, seed: int) -> dict[str, Source]:
        """Map the splits to what each has of a data set."""
        share = self.held_out_share()
        names = dict(zip((TRAIN, TEST), self.splits or (TRAIN, self.test_split), strict=False))
        train, test = names[TRAIN], names.get(TEST, TEST)
        used = DEFAULT_SHARE if share is None else share
        division = Division(train, used, seed, given=share is not None)
        trained = replace(whole, split=train, division=division)
        return {TRAIN: trained, TEST: replace(trained, split=test, held_out=True)}


class Origin(Section):
    """Examples that a model learns and does not play: rows of a file, or rollouts of a query."""

    path: str | None = None
    """A CSV, JSON-lines or Parquet file, whose `split` column may say train or test; a folder of
    files that are named train and test; or such a folder of the hub."""

    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """Columns that have other names in the file, such as {messages: conversations}."""

    runs: tuple[str, ...] = ()
    """Runs that a query reads, instead of a path."""

    query: str | None = None
    """A SELECT over the views of those runs (docs/sql.md), whose columns name rollouts: their
    tokens are trained as they were sampled."""

    def asked(self) -> dict[str, tuple[str, str | None]]:
        """Map the splits to the key and the text of the query of each."""
        return {TRAIN: ("query", self.query)}

    def refusals(self) -> Refusals:
        yield from super().refusals()
        queries = dict(self.asked().values())
        asked = {"runs": self.runs != (), **queries}
        given = [name for name, value in asked.items() if value]
        either = bool(given) != bool(self.path) and len(given) in (0, len(asked))
        yield (
            not either,
            f"path {self.path} with {', '.join(given) or 'no query'}: examples are of a file or of "
            f"rollouts; give path alone, or {', '.join(asked)}",
        )

        yield (
            self.path is None and self.columns != {},
            f"columns {', '.join(self.columns)} do nothing with a query; leave them out",
        )

    def files(self, seed: int = 0) -> dict[str, Source]:
        """Map the splits to the rows of each, if they are of a file; the seed is of a division."""
        if self.path is None:
            return {}
        whole = Division(TRAIN, 0, seed, given=False)
        return {TRAIN: replace(self._rows(self.path), division=whole)}

    def _rows(self, path: str) -> Source:
        names = tuple(sorted(self.columns.items()))
        return Source(locate_dataset(path), TRAIN, tuple(self.columns.values()), renamed=names)


class HeldOutOrigin(Splits, Origin):
    """Examples of which some are held out."""

    held_out: Share | str | None = None
    """A query, as `query`, of what is held out; or the share that is held out of a set without
    splits, by a hash of each row and the seed, which is 0.1 for a file without the column
    `split`."""

    def asked(self) -> dict[str, tuple[str, str | None]]:
        query = self.held_out if isinstance(self.held_out, str) else None
        return {**super().asked(), TEST: ("held_out", query)}

    def held_out_share(self) -> float | None:
        return None if isinstance(self.held_out, str) else self.held_out

    def refusals(self) -> Refusals:
        yield from super().refusals()
        ignored = self.given(
            "test_split", "splits", *["held_out"] * (self.held_out_share() is not None)
        )
        yield (
            self.query is not None and ignored != "",
            f"{ignored} with a query, which chooses what is trained; leave that out",
        )

    def files(self, seed: int = 0) -> dict[str, Source]:
        if self.path is None:
            return {}
        own = self.sides(self._rows(self.path), seed)
        return own if self.holds_out() else {TRAIN: own[TRAIN]}


class Lengths(Section):
    """Length of what is trained in one sequence."""

    most_tokens: int = Field(default=2048, ge=2, le=10**7)
    """The longest sequence, in tokens."""

    too_long: TooLong = "refuse"
    """What becomes of a longer one: the run is refused, its end is cut off, or it is left out, and
    with a side its pair."""


class TextBatches(Section):
    """Texts of a step."""

    examples: int = Field(default=16, ge=1, le=MOST_ROLLOUTS)
    """Texts of a step."""

    @property
    def size(self) -> int:
        return self.examples


class Batches(TextBatches):
    """Texts of a step, and the divisor of their loss.

    The loss is the sum over tokens of weight × negative log-probability. `token` divides it by the
    sum of the step's weights; `example` divides each example's by the sum of its own, and by the
    number of examples; `fixed` divides it by the `divisor`.
    """

    normalisation: Normalisation = "token"
    """Divisor of the texts' loss: a step's trained `token`s; each `example`'s tokens, and the
    examples; or a `fixed` number."""

    divisor: float | None = Field(default=None, gt=0, le=1e12)
    """The divisor of normalisation `fixed`."""

    requirements = (Needs("divisor", "normalisation", "fixed", each_other=True),)


class PairBatches(Section):
    """Pairs of a step, whose loss is the mean over them."""

    pairs: int = Field(default=16, ge=1, le=MOST_ROLLOUTS)
    """Pairs of a step, or labelled answers."""

    @property
    def size(self) -> int:
        return self.pairs


class Expert(Origin, TextBatches, Lengths):
    """Texts of an expert that are trained beside the rollouts of each step, as MIX and CHORD do.

    The loss of a step is (1 - µ) times that of its rollouts, plus µ times that of its texts, which
    is divided by their trained tokens. The texts are of the split train, or what a query chooses.
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
    """Part of a conversation that is trained (docs/methods.md)."""

    @property
    def given_texts(self) -> bool:
        """Whether the recipe has an expert."""
        return self.path is not None or self.query is not None

    requirements = (Needs("decay_steps", "final_share", each_other=True),)

    def refusals(self) -> Refusals:
        given = self.given(*Expert.model_fields)
        if not given:
            return
        yield (
            not self.given_texts,
            f"{EXPERT} without texts ignores {given}; give {EXPERT}.path, or runs and query, or "
            "leave them out",
        )
        yield from super().refusals()
        yield (
            self.trained != "assistant" and self.query is not None,
            f"{EXPERT}.trained {self.trained} does nothing with a query, which trains what was "
            "sampled; leave it out",
        )

    def share_at(self, step: int) -> float:
        """Return the share of a step, which counts from 0 (Zhang et al., 2025, arXiv:2508.11408).

        It rises linearly over the warm-up to `share`, and falls by a cosine to `final_share`.
        """
        if step < self.warmup_steps:
            return self.share * step / self.warmup_steps
        last = self.share if self.final_share is None else self.final_share
        passed = step - self.warmup_steps
        if passed >= self.decay_steps:
            return last
        return last + (self.share - last) * (1 + cos(pi * passed / self.decay_steps)) / 2
