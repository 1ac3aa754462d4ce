"""What a recipe says of its examples: where they are, in which order, and how many a step has."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from adapters.project.hub import locate_dataset
from tasks.examples.curricula import Curriculum, Order
from tasks.examples.reading import Division, Source
from tasks.settings.section import MOST_ROLLOUTS, Refusals, Section
from tasks.storage.run_folder import folder_of
from tasks.texts.rules import TEST, TRAIN, Normalisation, TooLong

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from tasks.texts.chosen_rollouts import RolloutQuery


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
            len({*self.splits}) < len(self.splits),
            f"splits {', '.join(self.splits)}, which are one; give two, or a share as held_out",
        )
        yield (
            len(self.splits) not in (0, needed),
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
        division = Division((train, test), used, seed, given=share is not None)
        trained = replace(whole, split=train, division=division)
        return {TRAIN: trained, TEST: replace(trained, split=test, held_out=True)}


class Dataset(Splits):
    """Examples that the agent is asked."""

    path: str
    """A CSV, JSON-lines or Parquet file, whose `split` column may say train or test; a folder of
    files that are named train and test; or such a folder of the hub, as
    hub:openai/gsm8k/main@REVISION (datasets/README.md)."""

    held_out: Share | None = None
    """The share that is held out of a set without splits, by a hash of each row and the seed; a
    file without the column `split` has 0.1."""

    columns: tuple[str, ...] = ()
    """The columns the agent reads; a file without one of them is refused before anything runs."""

    compares: str | None = None
    """Question of two answers, such as `Which answer is better?`: the rows are pairs, as those of
    `prefer`, and the agent is a judge, whose reward is whether it prefers the chosen one."""

    order: Order = "shuffled"
    """Order of the training examples: passes that are `shuffled`, `sequential` or `easy_to_hard`,
    or a ranking for each step by the `pass_rate` measured so far (datasets/README.md)."""

    difficulty: str | None = None
    """The column of numbers by which `easy_to_hard` orders."""

    target: float = Field(default=0.5, ge=-1e9, le=1e9)
    """The mean reward at which `pass_rate` prefers an example."""

    def refusals(self) -> Refusals:
        yield from super().refusals()
        yield (
            (self.order == "easy_to_hard") != (self.difficulty is not None),
            f"order {self.order} with difficulty {self.difficulty}: one without the other does "
            "nothing; give order easy_to_hard and a column of numbers, or neither",
        )
        yield (
            self.order != "pass_rate" and self.target != 0.5,
            f"target {self.target:g} would be ignored by order {self.order}, which no reward "
            "changes; leave it out, or give order pass_rate",
        )

    def held_out_share(self) -> float | None:
        return self.held_out

    def sources(self, seed: int) -> dict[str, Source]:
        """Map the splits to the examples of each; the seed is that of a division."""
        trained = Curriculum(self.order, self.difficulty, self.target)
        own = self.sides(self._rows(), seed)
        return {**own, TRAIN: replace(own[TRAIN], curriculum=trained)}

    def _rows(self) -> Source:
        given = locate_dataset(self.path), TRAIN, self.columns
        if self.compares is None:
            return Source(*given)
        from tasks.pairs.verdicts import ComparedExamples

        return ComparedExamples(*given, question=self.compares)


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
        whole = Division((TRAIN, TEST), 0, seed, given=False)
        return {TRAIN: replace(self._rows(self.path), division=whole)}

    def _rows(self, path: str) -> Source:
        names = tuple(sorted(self.columns.items()))
        return Source(locate_dataset(path), TRAIN, tuple(self.columns.values()), renamed=names)

    def queries(self, base: str, where: str = "dataset") -> "dict[str, RolloutQuery]":
        """Map the splits to the query of each, if they are of runs, whose models are of `base`.

        The keys of the queries are `where` in the recipe.
        """
        from tasks.texts.chosen_rollouts import RolloutQuery

        runs = tuple(folder_of(name) for name in self.runs)
        return {
            split: RolloutQuery(runs, f"{where}.{key}", query, base)
            for split, (key, query) in self.asked().items()
            if query is not None
        }


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


class Batches(Section):
    """Texts of a step, and the divisor of their loss."""

    examples: int = Field(default=16, ge=1, le=MOST_ROLLOUTS)
    """Texts of a step."""

    normalisation: Normalisation = "token"
    """Divisor of the texts' loss: a step's trained `token`s; each `example`'s tokens, and the
    examples; or a `fixed` number."""

    divisor: float | None = Field(default=None, gt=0, le=1e12)
    """The divisor of normalisation `fixed`."""

    def refusals(self) -> Refusals:
        yield from super().refusals()
        yield (
            (self.normalisation == "fixed") != (self.divisor is not None),
            f"normalisation {self.normalisation} with divisor {self.divisor}: one without the "
            "other does nothing; give normalisation fixed and a divisor, or neither",
        )
