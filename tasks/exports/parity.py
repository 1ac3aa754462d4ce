"""What was exported → how far its log-probabilities are from those of the service's sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapters.errors import UserError

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 17 + 25 is 42.",
    'In JSON, Ada of London is {"name": "Ada", "city": "London"}, and nothing more is said.',
    "def double(number: int) -> int:\n    return 2 * number\n",
    "Are you a quiet otter? Yes, I am a quiet otter, and I like what you ask.",
)
"""Texts that are scored: their content does not matter, since every weight takes part in each."""


class ExportRefused(UserError):
    """Refusal of an export: of what cannot be written, or is not what was trained."""


@dataclass(frozen=True)
class Parity:
    """Largest differences to the sampler's log-probabilities: of what was written, and the base's.

    `rounded` is that of the weights in bfloat16, if they are written so; `written` is then that of
    the weights before.
    """

    tokens: int
    written: float
    base: float
    tolerance: float
    rounded: float | None = None

    @property
    def changed(self) -> bool:
        """Whether the base fails the check."""
        return self.base > self.tolerance

    def __str__(self) -> str:
        rounded = "" if self.rounded is None else f", rounded to bfloat16 by {self.rounded:.2g}"
        return (
            f"log-probabilities of {self.tokens} tokens differ by at most {self.written:.2g} from "
            f"the service's ({self.tolerance:g} is allowed){rounded}; the base's by {self.base:.2g}"
        )

    def check(self) -> None:
        """Refuse (ExportRefused) weights that are not what the service samples."""
        if not self.written <= self.tolerance:
            raise ExportRefused(
                f"the export is not what the service samples: its {self}. Nothing was "
                "written; look whether the base is the one that was trained or, if the service is "
                "known to compute in another precision, give a larger --tolerance"
            )
        if self.changed and self.rounded is not None and self.rounded >= self.base:
            raise ExportRefused(
                f"bfloat16 rounds away what training changed: {self}. Nothing was written; give "
                "--dtype float32, or export an adapter by --format peft"
            )


def sequences_of(tokenizer: Any) -> list[list[int]]:
    """Return the tokens of the texts that are scored."""
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


def largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).max())
