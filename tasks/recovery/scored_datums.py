"""The first datums of a step, scored by the sampler of the checkpoint that the step begins with.

Datums that no policy sampled have no log-probabilities beside them. Those of the saved sampler are
what the trainer must give as well, before the first step and after a rebuild.
"""

import logging
from collections.abc import Sequence

import numpy as np

from adapters.errors import UserError
from adapters.tinker.service import Service, ServiceRefused
from tasks.checkpoints import Checkpoint
from tasks.recovery.recorded_steps import Evidence, StepDatums

MOST_SCORED = 4
"""Datums of a step that are scored."""

log = logging.getLogger(__name__)


class SamplerApart(UserError):
    """Refusal to train a policy that is sampled by other probabilities than it is trained by."""


def score_datums(
    service: Service, checkpoint: Checkpoint | None, datums: StepDatums, most: int
) -> list[Evidence]:
    """Have a checkpoint's sampler score the first datums of a step, all of its first file's.

    There is no evidence if their loss has no weights, which tell what is trained, if it has
    several targets a place, as with a teacher, or if the checkpoint is gone.
    """
    scored = [datum for one in datums.request.passes[:1] if one.term == 0 for datum in one.datums]
    scored = scored[:most]
    inputs = [datum.loss_fn_inputs for datum in scored]
    targets = [given["target_tokens"].to_numpy() for given in inputs]
    comparable = all("weights" in given for given in inputs)
    comparable &= all(own.ndim == 1 for own in targets)
    if checkpoint is None or not scored or not comparable:
        return []
    tokens = [
        [*datum.model_input.to_ints(), int(own[-1])]
        for datum, own in zip(scored, targets, strict=True)
    ]
    try:
        sampler = service.sampler(checkpoint.sampler)
        found = sampler.score(tokens, [len(own) for own in targets])
    except ServiceRefused as error:
        log.warning("%s. The first datums of step %d are not scored", error, datums.step)
        return []
    masks = [(given["weights"].to_numpy() != 0).astype(np.int8) for given in inputs]
    return [Evidence(*one) for one in zip(scored, found, masks, strict=True)]


def compare_sampler(
    evidence: Sequence[Evidence], logprobs: Sequence[np.ndarray], tolerance: float | None
) -> dict[str, float]:
    """Measure how far the first update's log-probabilities are off those of the sampler.

    `sampler/apart` is the largest difference over the trained tokens of the scored datums, which
    SamplerApart refuses above the tolerance; `sampler/kl` is the mean of log q - log p, q being the
    sampler. Both are 0 if the service samples what it trains.
    """
    if not evidence:
        return {}
    differences = np.concatenate(
        [
            (one.logprobs.astype(np.float64) - trained)[one.mask != 0]
            for one, trained in zip(evidence, logprobs, strict=False)
        ]
    )
    apart = float(np.abs(differences).max())
    if tolerance is not None and not apart <= tolerance:
        raise SamplerApart(
            f"the untrained policy gives log-probabilities that are up to {apart:.3g} off those of "
            f"its sampler, and checkpoints.probe_tolerance is {tolerance:g}: the service trains in "
            "another precision than it samples. Give a larger checkpoints.probe_tolerance, if "
            "measures by the sampler may be that rough"
        )
    return {"sampler/apart": apart, "sampler/kl": float(differences.mean())}
