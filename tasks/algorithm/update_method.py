"""The method of an update: what a step's datums become at the service."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from tinker import AdamParams, Datum

from adapters.tinker.live_policy import UpdateRequest
from tasks.algorithm.learning_rates import Schedule, share_by_sample
from tasks.algorithm.losses import service_loss
from tasks.algorithm.settings import Settings


@dataclass(frozen=True)
class UpdateMethod:
    """Method of an update: the loss with its settings, the optimizer, and its steps.

    The datums are split evenly, in their order, into `substeps` minibatches with an optimizer step
    each, `epochs` times over; those of a pair stay together. `by_batch` makes a forward-backward
    pass of each rollout batch instead, and one optimizer step. `scale_by_ess` scales the learning
    rate of each optimizer step by its effective sample size (`tasks.algorithm.learning_rates`).
    """

    loss: str
    loss_settings: Settings
    optimizer: AdamParams
    schedule: Schedule | None = None
    substeps: int = 1
    epochs: int = 1
    by_batch: bool = False
    scale_by_ess: bool = False

    def request(self, step: int) -> UpdateRequest:
        optimizer, schedule = self.optimizer, self.schedule
        if schedule is not None:
            rate = optimizer.learning_rate * schedule.share(step)
            optimizer = optimizer.model_copy(update={"learning_rate": rate})
        loss = service_loss(self.loss, self.loss_settings)
        share = share_by_sample if self.scale_by_ess else None
        return UpdateRequest(loss, optimizer, self.substeps * self.epochs > 1, share)

    def minibatches(self, units: Sequence[Sequence[Datum]]) -> list[list[Datum]]:
        """Split units, each a few datums that stay together, into the passes of the optimizer."""
        parts = min(self.substeps, len(units))
        bounds = [len(units) * part // parts for part in range(parts + 1)] if parts else []
        epoch = [[*chain(*units[low:high])] for low, high in pairwise(bounds)]
        return epoch * self.epochs

    def optimizer_steps(self, datums: int) -> int:
        return 1 if self.by_batch and datums else min(self.substeps, datums) * self.epochs
