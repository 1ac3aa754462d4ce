"""The method of an update: what a step's datums become at the service."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tinker import AdamParams, Datum

from adapters.tinker.live_policy import Pass, ServiceLoss, UpdateRequest
from tasks.algorithm.learning_rates import MixingSchedule, Schedule, share_by_sample
from tasks.algorithm.losses import service_loss
from tasks.algorithm.settings import Settings

Units = Sequence[Sequence[Datum]]
"""Datums of a file, in units that are never split between optimizer steps."""


@dataclass(frozen=True)
class Term:
    """A term of a step's loss: a loss of the datums of one file, and the term's factor."""

    loss: str
    settings: Settings
    factor: float = 1.0

    def service_loss(self) -> ServiceLoss:
        return service_loss(self.loss, self.settings)


@dataclass(frozen=True)
class ExpertTerm:
    """Loss of an expert's texts, and its share µ: the loss of rollouts has the factor 1 - µ."""

    loss: str
    share: MixingSchedule


@dataclass(frozen=True)
class UpdateMethod:
    """Method of an update: the loss with its settings, the optimizer, and its steps.

    The datums are split evenly, in their order, into `substeps` minibatches with an optimizer step
    each, `epochs` times over; those of a pair stay together. `by_batch` makes a forward-backward
    pass of each rollout batch instead, and one optimizer step. `scale_by_ess` scales the learning
    rate of each optimizer step by its effective sample size (`tasks.algorithm.learning_rates`).
    With an `expert`, a step has a second file of datums, which each minibatch has its part of.
    """

    loss: str
    loss_settings: Settings
    optimizer: AdamParams
    schedule: Schedule | None = None
    substeps: int = 1
    epochs: int = 1
    by_batch: bool = False
    scale_by_ess: bool = False
    expert: ExpertTerm | None = None

    def terms(self, step: int) -> list[Term]:
        """Return the terms of the loss of a step, one for each file of its datums."""
        if self.expert is None:
            return [Term(self.loss, self.loss_settings)]
        share = self.expert.share.at(step)
        return [Term(self.loss, self.loss_settings, 1 - share), Term(self.expert.loss, {}, share)]

    def request(self, step: int, optimizer_steps: Sequence[Sequence[Pass]]) -> UpdateRequest:
        """Request the optimizer steps of a step by its learning rate."""
        optimizer, schedule = self.optimizer, self.schedule
        if schedule is not None:
            rate = optimizer.learning_rate * schedule.share(step)
            optimizer = optimizer.model_copy(update={"learning_rate": rate})
        share = share_by_sample if self.scale_by_ess else None
        return UpdateRequest(optimizer_steps, optimizer, share)

    def minibatches(self, step: int, files: Sequence[Units]) -> list[list[Pass]]:
        """Split the units of each file of a step; return the passes before each optimizer step."""
        losses = [term.service_loss() for term in self.terms(step)]
        parts = min(self.substeps, max(map(len, files)))
        split = zip(*(_split(units, parts) for units in files), strict=True)
        epoch = [
            [Pass(datums, losses[term], term) for term, datums in enumerate(of_files) if datums]
            for of_files in split
        ]
        return epoch * self.epochs

    def optimizer_steps(self, datums: int) -> int:
        """Count the optimizer steps of a step by the datums of its largest file."""
        return 1 if self.by_batch and datums else min(self.substeps, datums) * self.epochs


def _split(units: Units, parts: int) -> list[list[Datum]]:
    bounds = [len(units) * part // parts for part in range(parts + 1)] if parts else []
    return [[datum for unit in units[low:high] for datum in unit] for low, high in pairwise(bounds)]
