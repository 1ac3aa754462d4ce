"""Give a checkpoint a name, and refuse one that a comparison does not show to be better."""

import re

from adapters.calls import POLICY
from adapters.errors import UserError, counted
from tasks.checkpoints import Ledger, read_checkpoint
from tasks.comparison.comparisons import Comparison
from tasks.comparison.promotions import NotBetter, Promotion, PromotionRefused, check_name
from tasks.comparison.statistics import Difference
from tasks.storage.manifest import read_manifest
from tasks.storage.run_folder import folder_of

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


def plan_promotion(checkpoint: str, name: str) -> Promotion:
    """Return the promotion of a checkpoint to a name; UserError if either cannot be."""
    check_name(name)
    run, step = read_checkpoint(checkpoint)
    if ":" in run:
        raise PromotionRefused(
            f"{checkpoint} is one policy of a run; name the run's checkpoint RUN@STEP"
        )
    folder = folder_of(run)
    created = read_manifest(folder)["created"]
    saved = Ledger(folder.checkpoints(POLICY)).at(step)
    return Promotion(name=name, run=run, step=saved.step, created=created)


def check_better(checkpoint: str, comparison: Comparison) -> Difference:
    """Return the gain of a checkpoint in a comparison; NotBetter if the comparison shows none.

    A failed rollout has no reward, so its example may have left the comparison: more of them than
    the other target has are no gain.
    """
    targets = {one.target: one for one in comparison.targets}
    own, other = targets[checkpoint], targets[comparison.against]
    if own.difference is None or not own.difference.is_gain or own.failed > other.failed:
        raise NotBetter(
            f"{own.target} is not shown to be better than {other.target}: reward {own.difference} "
            f"in {counted(comparison.examples, 'example')}, {own.failed} and {other.failed} failed "
            "rollouts. Play more by --examples or, if all were played, add rows to the held-out "
            "split"
        )
    return own.difference
