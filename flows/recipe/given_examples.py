"""What recipes say of their examples: those that the agent is asked, and those that are given."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

from ratchet.adapters.project.hub import locate_dataset
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.examples.reading import Order, Source
from ratchet.tasks.settings.given import (
    ALONE,
    TEST,
    TRAIN,
    WHOLE,
    Batches,
    HeldOutOrigin,
    Lengths,
    PairBatches,
    Share,
    Shares,
    Splits,
)
from ratchet.tasks.settings.run import HeldOut
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:  # they import the SDK, which takes a while
    from ratchet.tasks.given.given import Drawing, Given, GivenSource
    from ratchet.tasks.given.selections import Chosen
    from ratchet.tasks.recovery.recorded_steps import StepSource, TrainedPolicy

OF_TRAINING = {"query", "share"}
"""Keys of an origin of texts or pairs that say nothing of those that are held out."""
TOKENS = {"base", "renderer", "thinking"}
"""Keys of a model that say of which tokens a text is."""


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
    """Order of the training examples: `shuffled` anew in each pass, or `sequential` as they are."""

    def held_out_share(self) -> float | None:
        return self.held_out

    def sources(self, seed: int) -> dict[str, Source]:
        """Map the splits to the examples of each; the seed is that of a division."""
        own = self.sides(self._rows(), seed)
        return {**own, TRAIN: replace(own[TRAIN], order=self.order)}

    def _rows(self) -> Source:
        given = locate_dataset(self.path), TRAIN, self.columns
        if self.compares is None:
            return Source(*given)
        from ratchet.tasks.given.pairs import ComparedExamples

        return ComparedExamples(*given, question=self.compares)


class GivenDataset(HeldOutOrigin, Lengths):
    """Units that are given to learn, of one source or of several."""

    def origins(self) -> Mapping[str, HeldOutOrigin]:
        """Map the names of the sources, in their order, to where their units are."""
        return {ALONE: self}

    def shares(self) -> Shares:
        return WHOLE


class GivenRecipe(RunRecipe):
    """The recipe of a run that learns what it is given, and plays nothing."""

    if TYPE_CHECKING:  # each recipe has these sections, in an order of its own
        dataset: GivenDataset
        batch: Batches | PairBatches
        evaluation: HeldOut

    @abstractmethod
    def units(self, run: RunFolder) -> "Given":
        """Return the units of a run, by the files that it has of them."""

    @abstractmethod
    def written(self, rows: Source) -> "GivenSource":
        """Return the units of some rows."""

    @property
    @abstractmethod
    def chosen(self) -> "type[Chosen]":
        """Kind of units that queries choose."""

    def holds_out(self) -> bool:
        return any(one.holds_out() for one in self.dataset.origins().values())

    def scored_by(self) -> Iterator[str]:
        if self.holds_out():
            yield "dataset.held_out"

    def scores_units(self) -> bool:
        """Return whether another policy scores each unit when the run begins."""
        return bool(self.teachers().models)

    def queried_runs(self) -> Iterator[str]:
        for one in self.dataset.origins().values():
            yield from one.runs

    def data_sets(self, *, bound: bool) -> list[str | None]:
        return [] if bound else [one.path for one in self.dataset.origins().values()]

    def sources(self) -> dict[str, Source]:
        seed = self.evaluation.drawn_by(self.seed)
        return {
            _name(split, name): rows
            for name, one in self.dataset.origins().items()
            for split, rows in one.files(seed).items()
        }

    def given_examples(self) -> "dict[str, GivenSource]":
        """Map the splits to the units of each, or SPLIT/NAME to those of each source."""
        trained = self._chosen(TRAIN)
        named: dict[str, GivenSource] = {
            **{name: self.written(rows) for name, rows in self.sources().items()},
            **trained,
            **self._chosen(TEST, tuple(trained.values())),
        }
        return {name: named[name] for name in sorted(named, key=_is_held_out)}

    def _chosen(self, split: str, apart: "tuple[Chosen, ...]" = ()) -> "dict[str, Chosen]":
        """Map the sources of a split to what their queries choose."""
        from ratchet.tasks.given.selections import queries_of

        chosen: dict[str, Chosen] = {}
        for name, one in self.dataset.origins().items():
            where = "dataset" if name == ALONE else f"dataset.sources.{name}"
            if query := queries_of(one, self.model.base, where).get(split):
                chosen[_name(split, name)] = self.chosen(query, apart)
        return chosen

    def steps_of(self, epochs: float) -> int:
        """Return the steps whose batches are so many passes over the training units.

        With several sources these are the units of all of them.
        """
        units = sum(len(of) for name, of in self.given_examples().items() if not _is_held_out(name))
        return ceil(Fraction(str(epochs)) * units / self.batch.size)

    def measured_by(self, select: str) -> dict[str, Any]:
        values = self.model_dump(mode="json")
        dataset = values["dataset"]
        sources = {name: _held_out(one) for name, one in dataset.get("sources", {}).items()}
        return {
            "evaluation": values["evaluation"],
            "dataset": {**_held_out(dataset), "sources": sources},
            "teacher": values.get("teacher"),
            **self.compared_by(),
        }

    def compared_by(self) -> dict[str, Any]:
        """Map the keys by which a checkpoint is measured on held-out units."""
        return {"model": self.model.model_dump(include=TOKENS)}

    def drawing(self) -> "Drawing":
        from ratchet.tasks.given.given import Drawing

        return Drawing(self.batch, self.seed, self.dataset.shares())

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: ByStep[RunRecipe]
    ) -> "StepSource":
        """Return what restores the datums of the policy: the tokens of the units."""
        from ratchet.tasks.given.given import GivenSteps

        drawings = recipes.make(GivenRecipe, GivenRecipe.drawing)
        return GivenSteps(self.units(run), run.datums, drawings)


def _held_out(origin: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in origin.items() if key not in OF_TRAINING}


def _name(split: str, source: str) -> str:
    return split if source == ALONE else f"{split}/{source}"


def _is_held_out(name: str) -> bool:
    return name.partition("/")[0] == TEST
