"""Optional parts of a step: a judge, a reference, teachers, an expert's texts.

A plain recipe has none of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratchet.adapters.calls import POLICY
from ratchet.adapters.tinker.service import Service
from ratchet.flows.checkpoints.binding import open_references
from ratchet.flows.opening.rollouts import RolloutRunner, ask_judge
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.given.given import Drawing, bind_given, draw_given
from ratchet.tasks.given.texts import Texts
from ratchet.tasks.judging import draw_groups, measure_verdicts, record_verdicts
from ratchet.tasks.metrics import name_expert
from ratchet.tasks.recording.step_log import Metrics
from ratchet.tasks.scoring import References, compute_references
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import ancestors
from ratchet.tasks.storage.names import JUDGE, shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import flat_values, read_table


class StepPart:
    """Optional part of a step; each kind says what it adds."""

    def verdicts(self, step: int, spans: Sequence[Path]) -> Path | None:
        """Score the rollouts of a step in place of the agent's rewards; None if it is no judge."""

    def logprobs(
        self, name: str, step: int, spans: Sequence[Path], trajectories: Path
    ) -> Mapping[str, Path]:
        """Score the trajectories of a policy; return the files of log-probabilities by source."""
        return {}

    def datums(self, name: str, step: int) -> Sequence[Path]:
        """Return files of datums that a policy is trained on beside its rollouts."""
        return ()

    def metrics(self, step: int, spans: Sequence[Path]) -> Metrics:
        """Measure what the part added to a step."""
        return {}


@dataclass(frozen=True)
class JudgePart(StepPart):
    """A judge, which after `step` updates scores the rollouts of a step."""

    run: RunFolder
    recipe: Recipe
    runner: RolloutRunner

    def verdicts(self, step: int, spans: Sequence[Path]) -> Path | None:
        path, judge = self.run.verdicts(step), self.recipe.judge
        if is_written(path):
            return path
        shard = draw_groups(self.run.shard(shard_name(JUDGE, step)), spans, judge, self.recipe.seed)
        return record_verdicts(path, ask_judge(self.runner, judge, shard, step))

    def metrics(self, step: int, spans: Sequence[Path]) -> Metrics:
        judged = self.run.sealed(shard_name(JUDGE, step))
        return measure_verdicts(self.run.verdicts(step), judged, spans, ancestors(self.run))


@dataclass(frozen=True)
class ReferencePart(StepPart):
    """Other policies that read the tokens: the reference, and teachers."""

    run: RunFolder
    references: Mapping[str, References]

    def logprobs(
        self, name: str, step: int, spans: Sequence[Path], trajectories: Path
    ) -> Mapping[str, Path]:
        shards = self.run.shards_of(self.run.batches_of(step))
        return {
            source: compute_references(
                self.run.references(name, step, source), trajectories, asked, shards, spans
            )
            for source, asked in self.references.items()
        }


@dataclass(frozen=True)
class ExpertPart(StepPart):
    """Texts of an expert."""

    run: RunFolder
    recipe: Recipe
    texts: Texts

    def datums(self, name: str, step: int) -> Sequence[Path]:
        drawing = Drawing(self.recipe.algorithm.expert, self.recipe.seed)
        return [draw_given(self.run.expert(name, step), self.texts, drawing, step)]

    def metrics(self, step: int, spans: Sequence[Path]) -> Metrics:
        drawn = self.run.expert(POLICY, step)
        tokens = int(flat_values(read_table(drawn, ["mask"])["mask"]).sum())
        return name_expert({**self.texts.measure(drawn), "tokens": tokens})


@contextmanager
def open_parts(
    run: OpenRun, recipe: Recipe, judge: RolloutRunner
) -> Iterator[tuple[StepPart, ...]]:
    """Open the parts of a recipe; the runner `judge` plays the judge's rollouts."""
    expert, texts = recipe.algorithm.expert, Texts(run.folder.expert_texts)
    if expert.given_texts:
        with run.beginning():
            bind_given(texts.path, texts, recipe.given_examples(), run.chat(recipe.model), expert)
    with open_readers(recipe, run.folder, run.service) as readers:
        experts = (ExpertPart(run.folder, recipe, texts),) if expert.given_texts else ()
        yield (*experts, *judges(run.folder, recipe, judge), *readers)


@contextmanager
def open_readers(
    recipe: Recipe, run: RunFolder, service: Service
) -> Iterator[tuple[ReferencePart, ...]]:
    """Open the reference and the teachers of a recipe, if it has any."""
    with open_references(recipe, run, service) as references:
        yield (ReferencePart(run, references),) if references else ()


def judges(run: RunFolder, recipe: Recipe, runner: RolloutRunner) -> tuple[JudgePart, ...]:
    return (JudgePart(run, recipe, runner),) if recipe.judge.judges else ()


def measure_parts(parts: Sequence[StepPart], step: int, spans: Sequence[Path]) -> Metrics:
    return {name: value for part in parts for name, value in part.metrics(step, spans).items()}
