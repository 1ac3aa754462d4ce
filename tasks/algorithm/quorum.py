"""How many rollouts of a batch must have a reward before the others are left out."""

from fractions import Fraction
from math import ceil


def quorum_size(share: float, rollouts: int) -> int:
    """Return the fewest rollouts that are a share of all; the share is the decimal as written."""
    return ceil(Fraction(str(share)) * rollouts)
