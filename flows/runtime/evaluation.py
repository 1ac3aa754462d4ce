"""Evaluation of a checkpoint: held-out examples are played, sampled and greedily, and scored."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from adapters.calls import Sampling
from flows.recipe import Recipe
from flows.runtime.open_run import OpenRun, greedy_sampling, test_split, training_sampling
from flows.runtime.task_runner import RolloutRunner
from tasks.evaluations import PlayedShard, Score, read_evaluation, score_rollouts
from tasks.shards import draw_shard
from tasks.storage.run_folder import shard_name


class EvaluationResult(BaseModel):
    """Scores of a checkpoint, and the files with its games, by how the rollouts were sampled."""

    model_config = ConfigDict(frozen=True)

    file: Path
    scores: dict[str, Score]
    games: dict[str, Path]


def evaluate_checkpoint(
    recipe: Recipe, run: OpenRun, runner: RolloutRunner, step: int, tag: str = ""
) -> dict[str, Score]:
    """Return the scores of checkpoint `step` by how its rollouts were sampled.

    What is on disk is not played again. `tag` keeps apart what other settings have scored.
    """
    played = play_held_out(recipe, run, runner, step, tag)
    return read_evaluation(score(recipe, run, played, f"{step:05d}{tag}"))


def play_held_out(
    recipe: Recipe, run: OpenRun, runner: RolloutRunner, step: int, tag: str = ""
) -> dict[str, PlayedShard]:
    """Play the held-out examples with checkpoint `step`, sampled and, if asked for, greedily."""
    evaluation, source = recipe.evaluation, test_split(recipe)
    size = min(evaluation.examples, len(source.examples()))

    def play(split: str, sampling: Sampling, group_size: int) -> PlayedShard:
        path = run.folder.shard(shard_name(f"{split}{tag}", step))
        shard = draw_shard(path, source, recipe.seed, 0, size, recipe.rollouts.batches)
        batches = runner.play_shard(run, shard, step, sampling, group_size)
        return PlayedShard(shard, [batch.result() for batch in batches])

    played = {"sampled": play("test", training_sampling(recipe), evaluation.rollouts)}
    if evaluation.greedy:
        played["greedy"] = play("greedy", greedy_sampling(recipe), 1)
    return played


def score(recipe: Recipe, run: OpenRun, played: Mapping[str, PlayedShard], name: str) -> Path:
    """Score held-out rollouts; return the file of the scores."""
    return score_rollouts(run.folder.evaluation(name), played, recipe.evaluation.threshold)


def settings_tag(bound: Recipe, asked: Recipe) -> str:
    """Name the settings of an evaluation; empty if they are the run's own."""
    if asked.evaluation == bound.evaluation:
        return ""
    return f".{asked.fingerprint()[:6]}"
