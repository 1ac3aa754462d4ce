"""What a recipe says of its examples: where they are, in which order, and how many a step has."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from adapters.project.hub import locate_dataset
from flows.recipe.section import MOST_ROLLOUTS, Refusals, Section
from tasks.examples.curricula import Curriculum, Order
from tasks.examples.reading import SHUFFLED, Source
from tasks.storage.run_folder import folder_of
from tasks.texts.rules import TEST, TRAIN, Normalisation, TooLong

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from tasks.texts.chosen_rollouts import RolloutQuery


class Dataset(Section):
    """Examples that the agent is asked."""

    path: str
    """A CSV, JSON-lines or Parquet file whose `split` column says train or test; a folder of files
    that are named train and test; or such a folder of the hub, as hub:openai/gsm8k/main@REVISION
    (datasets/README.md)."""

    test_split: str = "test"
    """The split that is held out for evaluation, where its name is another, such as validation."""

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

    def train_split(self) -> Source:
        return self._split("train", Curriculum(self.order, self.difficulty, self.target))

    def held_out_split(self) -> Source:
        return self._split(self.test_split)

    def _split(self, split: str, curriculum: Curriculum = SHUFFLED) -> Source:
        given = locate_dataset(self.path), split, self.columns, curriculum
        if self.compares is None:
            return Source(*given)
        from tasks.pairs.verdicts import ComparedExamples

        return ComparedExamples(*given, question=self.compares)


class Origin(Section):
    """Examples that a model learns and does not play: rows of a file, or rollouts of a query."""

    path: str | None = None
    """A CSV, JSON-lines or Parquet file whose `split` column says train or test; a folder of files
    that are named train and test; or such a folder of the hub."""

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

    def files(self) -> dict[str, Source]:
        """Map the splits to the rows of each, if they are of a file."""
        return {} if self.path is None else {TRAIN: self._rows(self.path, TRAIN)}

    def _rows(self, path: str, split: str) -> Source:
        names = tuple(sorted(self.columns.items()))
        return Source(locate_dataset(path), split, tuple(self.columns.values()), renamed=names)

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


class HeldOutOrigin(Origin):
    """Examples of which some are held out."""

    test_split: str = "test"
    """The split that is held out, where its name is another, such as validation."""

    held_out: str | None = None
    """A query, as `query`, of what is held out."""

    def asked(self) -> dict[str, tuple[str, str | None]]:
        return {**super().asked(), TEST: ("held_out", self.held_out)}

    def refusals(self) -> Refusals:
        yield from super().refusals()
        yield (
            self.query is not None and self.test_split != "test",
            f"test_split {self.test_split} does nothing with a query; leave it out",
        )

    def files(self) -> dict[str, Source]:
        if self.path is None:
            return {}
        return {**super().files(), TEST: self._rows(self.path, self.test_split)}


def without_columns(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the columns of a dataset that gives none, as recipes older than the key do."""
    for origin in (values["dataset"], *values["dataset"].get("sources", {}).values()):
        if not origin["columns"]:
            del origin["columns"]
    return values


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
