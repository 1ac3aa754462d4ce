"""Additions of a recipe to the path of a step: a judge, a reference, teachers, an expert's texts.

A plain recipe has none of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapters.calls import POLICY
from flows.recipe.recipe import Recipe
from flows.runtime.bound_checkpoints import open_references
from flows.runtime.open_rollouts import RolloutRunner, ask_judge
from flows.runtime.open_run import OpenRun
from flows.runtime.policies import RunPolicy
from tasks.given.given import Drawing, bind_given, draw_given
from tasks.given.texts import Texts
from tasks.judging import draw_groups, measure_verdicts, record_verdicts
from tasks.metrics import name_expert
from tasks.recording.step_log import Metrics
from tasks.references import References, compute_references
from tasks.storage.manifest import ancestors
from tasks.storage.names import JUDGE, shard_name
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import flat_values, read_table


@dataclass(frozen=True)
class Extras:
    """Additions of a run: a judge, others who read the tokens, and an expert's texts."""

    run: OpenRun
    recipe: Recipe
    judge: RolloutRunner
    references: Mapping[str, References]
    texts: Texts | None = None

    def verdicts(self, step: int, spans: Sequence[Path]) -> Path | None:
        """Have the judge score the rollouts of a step; None without a judge.

        If a trained policy answers the judge, it does so after `step` updates.
        """
        return judge_step(self.run.folder, self.recipe, self.judge, step, spans)

    def logprobs(
        self, policy: RunPolicy, step: int, spans: Sequence[Path], trajectories: Path
    ) -> dict[str, Path]:
        """Compute the log-probabilities of tokens under the reference and the teachers, if any."""
        folder = self.run.folder
        shards = folder.shards_of(folder.batches_of(step)) if self.references else []
        return {
            source: compute_references(
                folder.references(policy.name, step, source), trajectories, asked, shards, spans
            )
            for source, asked in self.references.items()
        }

    def datums(self, policy: RunPolicy, step: int) -> list[Path]:
        """Draw the expert's texts that a step trains beside its rollouts, if there is an expert."""
        if self.texts is None:
            return []
        drawing = Drawing(self.recipe.algorithm.expert, self.recipe.seed)
        return [draw_given(self.run.folder.expert(policy.name, step), self.texts, drawing, step)]

    def metrics(self, step: int, spans: Sequence[Path]) -> Metrics:
        """Measure the expert's texts and the judge's work of a step; nothing without them."""
        folder, measured = self.run.folder, dict[str, float]()
        if self.texts is not None:
            drawn = folder.expert(POLICY, step)
            tokens = int(flat_values(read_table(drawn, ["mask"])["mask"]).sum())
            measured = name_expert({**self.texts.measure(drawn), "tokens": tokens})
        if self.recipe.judge.judges:
            verdicts, judged = folder.verdicts(step), folder.sealed(shard_name(JUDGE, step))
            measured |= measure_verdicts(verdicts, judged, spans, ancestors(folder))
        return measured


def judge_step(
    run: RunFolder, recipe: Recipe, runner: RolloutRunner, step: int, spans: Sequence[Path]
) -> Path | None:
    """Have the judge score the rollouts of a step; None without a judge."""
    judge = recipe.judge
    if not judge.judges:
        return None
    shard = draw_groups(run.shard(shard_name(JUDGE, step)), spans, judge, recipe.seed)
    return record_verdicts(run.verdicts(step), ask_judge(runner, judge, shard, step))


@contextmanager
def open_extras(run: OpenRun, recipe: Recipe, judge: RolloutRunner) -> Iterator[Extras]:
    """Open the additions of a recipe; the runner `judge` plays the judge's rollouts."""
    texts, expert = None, recipe.algorithm.expert
    if expert.given_texts:
        with run.beginning():
            texts, chat = Texts(run.folder.expert_texts), run.chat(recipe.model)
            bind_given(texts.path, texts, recipe.given_examples(), chat, expert)
    with open_references(recipe, run.folder, run.service) as references:
        yield Extras(run, recipe, judge, references, texts)
