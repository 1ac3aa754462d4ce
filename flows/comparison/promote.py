"""Give a checkpoint a name, if it is better than the one that has the name."""

import re
from datetime import UTC, datetime

from adapters.errors import UserError, counted
from flows.runtime.bound_checkpoints import CheckpointName
from tasks.comparison.comparisons import ComparedTarget, Comparison
from tasks.comparison.promotions import (
    NotBetter,
    Promotion,
    PromotionRefused,
    check_name,
    last_promotion,
    record_promotion,
)
from tasks.examples.reading import Source
from tasks.storage.manifest import read_manifest

CONDITION = re.compile(r"\s*reward\s*>\s*(?P<target>\S+)\s*")


def read_condition(text: str) -> str:
    """Return the target than which a checkpoint is to be better, by `reward > TARGET`."""
    found = CONDITION.fullmatch(text)
    if found is None:
        raise UserError(
            f'--if "{text}" is no condition; write "reward > TARGET", where TARGET is a name, '
            "RUN@STEP, base, or a model of LiteLLM's"
        )
    return found["target"]


def plan_promotion(checkpoint: str, name: str, forced: str | None, *, gated: bool) -> Promotion:
    """Return the promotion of a checkpoint to a name, whose evidence is not there yet.

    UserError if there is no such checkpoint, if the name cannot be one, or if it is taken, and
    neither a gate nor a reason to force it is given.
    """
    check_name(name)
    named = CheckpointName.parse(checkpoint)
    named.check_whole(checkpoint)
    created, run = read_manifest(named.folder)["created"], named.run
    step, last = named.saved_step, last_promotion(name)
    replaces = None if last is None else last.checkpoint
    if last is not None and (replaces, last.created) == (f"{run}@{step}", created):
        raise PromotionRefused(f"{name} is {replaces} already; name another checkpoint")
    if last is not None and not gated and forced is None:
        raise PromotionRefused(
            f'{name} is {replaces}; give --if "reward > {name}", or --force REASON'
        )
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Promotion(
        name=name,
        run=run,
        step=step,
        created=created,
        when=when,
        replaces=replaces,
        forced=forced,
    )


def promote(
    planned: Promotion, comparison: Comparison | None, source: Source | None = None
) -> Promotion:
    """Record a promotion; NotBetter if its comparison shows no gain, unless it is forced.

    `source` has the held-out examples of which the comparison has played some, or all.
    """
    if comparison is not None:
        targets = {one.target: one for one in comparison.targets}
        own, other = targets[planned.checkpoint], targets[comparison.against]
        if planned.forced is None and not _is_better(own, other):
            raise NotBetter(
                f"{own.target} is not shown to be better than {other.target}: reward "
                f"{own.difference} in {counted(comparison.examples, 'example')}, {own.failed} and "
                f"{other.failed} failed rollouts; {planned.name} stays "
                f"{planned.replaces or 'the name of none'}. "
                f"{_more_examples(comparison, source)}, or give --force REASON"
            )
        evidence = {
            "comparison": comparison.folder,
            "recipe": comparison.recipe,
            "against": comparison.against,
            "difference": own.difference,
        }
        planned = planned.model_copy(update=evidence)
    record_promotion(planned)
    return planned


def _more_examples(comparison: Comparison, source: Source | None) -> str:
    """Say how more examples are played than those of a comparison."""
    if source is None or comparison.examples < len(source.examples()):
        return "Play more by --examples"
    return (
        f"All {comparison.examples} held-out examples were played; add rows of the split "
        f"{source.split} to {source.dataset}"
    )


def _is_better(own: ComparedTarget, other: ComparedTarget) -> bool:
    """Return whether a target has gained, and not by failing where the other one does not.

    A failed rollout has no reward, so its example may have left the comparison.
    """
    return own.difference is not None and own.difference.is_gain and own.failed <= other.failed
