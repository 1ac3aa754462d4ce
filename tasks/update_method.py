"""The method of an update: what a step's datums become at the service."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tinker import AdamParams, Datum

from ratchet.adapters.tinker.live_policy import Pass, ServiceLoss, UpdateRequest
from ratchet.tasks.algorithm.divergences import DIVERGENCE
from ratchet.tasks.algorithm.losses import service_loss
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.settings.algorithm import Divergence
from ratchet.tasks.settings.given import Expert
from ratchet.tasks.settings.optimizer import Optimizer

Units = Sequence[Sequence[Datum]]
"""Datums of a file, in units that are never split between optimizer steps."""


@dataclass(frozen=True)
class Term:
    """A term of a step's loss: a loss of the datums of one file, and the term's factor.

    `file` numbers the file among the step's files of datums.
    """

    loss: str
    settings: Settings
    factor: float = 1.0
    file: int = 0

    def service_loss(self) -> ServiceLoss:
        return service_loss(self.loss, self.settings)


@dataclass(frozen=True)
class UpdateMethod:
    """Method of an update: the loss with its settings, and the optimizer, in a run of `steps`.

    The datums are split evenly, in their order, into the optimizer's `substeps` minibatches with an
    optimizer step each, `epochs` times over; datums of a pair stay together. `by_batch` makes a
    forward-backward pass of each rollout batch instead, and one optimizer step. With an `expert`, a
    step has a second file of datums, which each minibatch has its part of, and the loss of the
    first one has the factor 1 - µ. A `divergence` in the loss is a second term of the datums of the
    first file, of the log-probabilities that the pass of the first term returns.
    """

    loss: str
    loss_settings: Settings
    optimizer: Optimizer
    steps: int
    by_batch: bool = False
    expert: Expert = field(default_factory=Expert)
    divergence: Divergence = field(default_factory=Divergence)

    @property
    def files(self) -> int:
        """Number of the files of datums that a step has."""
        return 2 if self.expert.given_texts else 1

    def terms(self, step: int) -> list[Term]:
        """Return the terms of the loss of a step; the first is of the datums of the first file."""
        share = self.expert.share_at(step) if self.expert.given_texts else 0.0
        terms = [Term(self.loss, self.loss_settings, 1 - share)]
        if (penalty := self.divergence).in_loss:
            factor = penalty.coefficient * (1 - share)
            terms.append(Term(DIVERGENCE, {"estimator": penalty.estimator}, factor))
        if self.expert.given_texts:
            terms.append(Term(self.expert.loss, {}, share, file=1))
        return terms

    def request(self, step: int, optimizer_steps: Sequence[Sequence[Pass]]) -> UpdateRequest:
        """Request the optimizer steps of a step by its learning rate."""
        adam = self.optimizer.model_dump(include={*AdamParams.model_fields})
        adam["learning_rate"] *= self.optimizer.share(step, self.steps)
        return UpdateRequest(optimizer_steps, AdamParams(**adam))

    def minibatches(self, step: int, units: Sequence[Units]) -> list[list[Pass]]:
        """Split the units of each term of a step; return the passes before each optimizer step."""
        terms = self.terms(step)
        losses = [term.service_loss() for term in terms]
        beside = [term.loss == DIVERGENCE for term in terms]
        parts = min(self.optimizer.substeps, max(map(len, units)))
        split = zip(*(_split(of_term, parts) for of_term in units), strict=True)
        epoch = [
            [
                Pass(datums, losses[term], term, beside[term])
                for term, datums in enumerate(of_terms)
                if datums
            ]
            for of_terms in split
        ]
        return epoch * self.optimizer.epochs

    def optimizer_steps(self, datums: int) -> int:
        """Count the optimizer steps of a step by the datums of its largest file."""
        one = self.by_batch and datums
        return 1 if one else min(self.optimizer.substeps, datums) * self.optimizer.epochs


def _split(units: Units, parts: int) -> list[list[Datum]]:
    bounds = [len(units) * part // parts for part in range(parts + 1)] if parts else []
    return [[datum for unit in units[low:high] for datum in unit] for low, high in pairwise(bounds)]
