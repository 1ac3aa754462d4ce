"""Compare checkpoints and models on the same held-out examples, pair by pair."""

from collections.abc import Sequence

from prefect import flow
from prefect.runtime import flow_run

from ratchet.adapters.errors import UserError, did_you_mean
from ratchet.adapters.tinker.engines import engines_kept
from ratchet.flows.evaluate import evaluate_once
from ratchet.flows.opening.eval_targets import EvalTarget, find_target
from ratchet.flows.opening.flow_runs import completed
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.comparison.comparisons import (
    ComparedTarget,
    Comparison,
    ExampleRow,
    name_comparison,
    read_played,
    write_comparison,
)
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import folder_of


@flow(name="compare", flow_run_name=lambda: f"compare {' '.join(flow_run.parameters['targets'])}")
def compare(recipe: Recipe, targets: Sequence[str], against: str | None = None) -> Comparison:
    """Compare targets on held-out examples; rollouts that are on disk are not played again.

    Args:
        recipe: Its agent plays its held-out examples, by its `evaluation` and the same seeds, with
            the weights of each target.
        targets: Each RUN, RUN@STEP, RUN@best, the name of a checkpoint, `base`, or a model of
            LiteLLM.
        against: The target with which each other one is compared; the first if empty.
    """
    titles = find_targets(recipe, targets, against)
    with engines_kept():
        played = {title: evaluate_once(recipe, model=title) for title in titles.values()}
    compared = [_summarize(title, target) for title, target in played.items()]
    other, fingerprint = titles[against or targets[0]], recipe.fingerprint()
    folder = name_comparison(recipe.agent, fingerprint, compared, other)
    asked = Comparison(
        folder=f"comparisons/{folder.name}",
        agent=recipe.agent,
        recipe=fingerprint,
        against=other,
        examples=0,
        targets=tuple(compared),
    )
    examples = {title: _read_examples(target) for title, target in played.items()}
    comparison = write_comparison(asked, examples)
    return completed(comparison)


def find_targets(recipe: Recipe, targets: Sequence[str], against: str | None) -> dict[str, str]:
    """Map each target to its whole name: RUN@STEP, `base`, or a model of LiteLLM.

    UserError if a target does not exist, if two are the same, or if there is only one.
    """
    titles = {name: find_target(recipe, None, None, name, True).title for name in targets}
    if len({*titles.values()}) < max(len(targets), 2):
        raise UserError(
            f"{', '.join(targets)} are {', '.join(titles.values())}, and at least two different "
            "ones can be compared; name each once"
        )
    if against is not None and against not in titles:
        raise UserError(
            f"--against {against} is none of {', '.join(targets)}{did_you_mean(against, targets)}; "
            "give one of them"
        )
    return titles


def _summarize(title: str, target: EvalTarget) -> ComparedTarget:
    scored = read_evaluation(target.file)["sampled"]
    return ComparedTarget(
        target=title,
        run=target.run,
        step=target.checkpoint,
        created=read_manifest(folder_of(target.run))["created"],
        evaluation=target.file.name,
        rollouts=scored.rollouts,
        failed=scored.failed,
        reward=scored.finished.mean,
        interval=scored.finished.interval,
        measures=scored.measures,
    )


def _read_examples(target: EvalTarget) -> list[ExampleRow]:
    """Read the sampled held-out examples of a target, by the roles that it answers."""
    shard = shard_name(f"test{target.tag}", target.checkpoint)
    roles = [role for roles in target.requested.policies().values() for role in roles]
    return read_played(folder_of(target.run).sealed(shard), roles)
