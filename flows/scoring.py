"""checkpoint → evaluation: the held-out examples, sampled and greedy."""

from pathlib import Path

from adapters.calls import Sampling
from flows.opening import Parts, greedy, sampled, test_split
from flows.recipe import Recipe
from tasks.checkpoints import Checkpoint
from tasks.evaluations import Score, read_evaluation
from tasks.stages import collect_rollouts, draw_shard, score_rollouts


def score(recipe: Recipe, parts: Parts, checkpoint: Checkpoint, tag: str = "") -> dict[str, Score]:
    """The checkpoint's scores by how its rollouts were sampled: `sampled` and, if asked, `greedy`.

    What is on disk is not played again. `tag` keeps apart what other settings have scored.
    """
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
    name = f"{checkpoint.version}{tag}"
    return read_evaluation(score_rollouts(folder, name, spans, evaluation.threshold))


def settings_tag(bound: Recipe, asked: Recipe) -> str:
    """Empty where the evaluation is the run's own, else a name for its settings."""
    if asked.evaluation == bound.evaluation:
        return ""
    return f".{asked.fingerprint()[:6]}"
