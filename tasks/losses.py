"""The table of losses: what each loss of Tinker reads from a datum, and which settings it has."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """A loss of the Tinker API.

    `inputs` maps each of its inputs to a column of the datums; `settings` are its own numbers.
    `normalised` is whether scaled advantages scale the whole loss.
    """

    inputs: Mapping[str, str]
    settings: frozenset[str] = frozenset()
    normalised: bool = True


POLICY_GRADIENT = {"target_tokens": "targets", "logprobs": "logprobs", "advantages": "advantages"}
CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})

LOSSES: Mapping[str, Loss] = {
    "importance_sampling": Loss(POLICY_GRADIENT),
    "ppo": Loss(POLICY_GRADIENT, CLIPS),
    "cispo": Loss(POLICY_GRADIENT, CLIPS),
    # The quadratic term of dro has no advantage that could be scaled.
    "dro": Loss(POLICY_GRADIENT, frozenset({"beta"}), normalised=False),
    "gspo": Loss({**POLICY_GRADIENT, "sequence_ratio_mask": "mask"}, CLIPS),
    # Weighted by advantages, cross-entropy is REINFORCE without a ratio: -sum A log p.
    "cross_entropy": Loss({"target_tokens": "targets", "weights": "advantages"}),
}


def find_loss(name: str) -> Loss:
    """Return the row of a loss; ValueError if there is none."""
    if name not in LOSSES:
        raise ValueError(f"no loss '{name}' (there is: {', '.join(LOSSES)})")
    return LOSSES[name]


def check_loss(name: str, settings: Mapping[str, float], normalise: str) -> None:
    """Refuse (ValueError) an unknown loss, an ignored setting, and a scale that has no effect."""
    loss = find_loss(name)
    ignored = sorted(settings.keys() - loss.settings)
    if ignored:
        known = ", ".join(sorted(loss.settings)) or "none"
        raise ValueError(
            f"the loss {name} would ignore {', '.join(ignored)} (it reads: {known}); "
            "remove them or choose another loss"
        )
    if not loss.normalised and normalise != "none":
        raise ValueError(
            f"normalise '{normalise}' scales advantages, but the quadratic term of {name} has "
            "none: use normalise 'none' with it"
        )
