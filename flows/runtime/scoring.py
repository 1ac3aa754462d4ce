"""checkpoint → evaluation: the held-out examples, sampled and greedy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from adapters.calls import Sampling
from flows.recipe import Recipe
from flows.runtime.open_run import greedy, sampled, test_split
from tasks.checkpoints import Checkpoint
from tasks.evaluations import Score, read_evaluation
from tasks.rollouts import Runner
from tasks.stages import collect_rollouts, draw_shard, score_rollouts


class Playing(Protocol):
    """What is needed of a run to play its agent."""

    @property
    def folder(self) -> Path: ...

    @property
    def runner(self) -> Runner: ...


class Evaluated(BaseModel):
    """Scores, and the files with their games, by how the rollouts were sampled."""

    model_config = ConfigDict(frozen=True)

    file: Path
    scores: dict[str, Score]
    games: dict[str, Path]


def score(
    recipe: Recipe, parts: Playing, checkpoint: Checkpoint, tag: str = ""
) -> dict[str, Score]:
    """The checkpoint's scores by how its rollouts were sampled: `sampled` and, if asked, `greedy`.

    What is on disk is not played again. `tag` keeps apart what other settings have scored.
    """
    spans = held_out(recipe, parts, checkpoint, tag)
    return read_evaluation(scored(recipe, parts.folder, spans, f"{checkpoint.version}{tag}"))


def held_out(
    recipe: Recipe, parts: Playing, checkpoint: Checkpoint, tag: str = ""
) -> dict[str, Path]:
    """The spans of the held-out examples, by how they were sampled."""
    folder, evaluation, source = parts.folder, recipe.evaluation, test_split(recipe)
    size = min(evaluation.examples, len(source.examples()))

    def play(split: str, sampling: Sampling, group_size: int) -> Path:
        batch = f"{split}{tag}-{checkpoint.version}"
        shard = draw_shard(folder, batch, source, recipe.seed, 0, size)
        return collect_rollouts(
            folder, batch, parts.runner, shard, checkpoint, group_size, sampling
        )

    spans = {"sampled": play("test", sampled(recipe), evaluation.rollouts)}
    if evaluation.greedy:
        spans["greedy"] = play("greedy", greedy(recipe), 1)
    return spans


def scored(recipe: Recipe, folder: Path, spans: Mapping[str, Path], name: str) -> Path:
    """The file with the scores of these spans."""
    return score_rollouts(folder, name, spans, recipe.evaluation.threshold)


def settings_tag(bound: Recipe, asked: Recipe) -> str:
    """Empty where the evaluation is the run's own, else a name for its settings."""
    if asked.evaluation == bound.evaluation:
        return ""
    return f".{asked.fingerprint()[:6]}"
