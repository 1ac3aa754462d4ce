"""When a run ends before its last step: at a value of what is measured, or without a gain."""

import operator
import re
from collections.abc import Callable, Mapping

from pydantic import Field, field_validator

from ratchet.adapters.errors import UserError, did_you_mean
from ratchet.tasks.settings.section import Section

MEASURED = "held_out/"
"""Beginning of the names of what is measured on held-out examples."""
CONDITION = re.compile(
    rf"\s*(?P<metric>{MEASURED}\S+)\s*(?P<sign>>=|<=|>|<)\s*(?P<number>[-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*"
)
SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


class Stop(Section):
    """End of a run before its last step, by what is measured on held-out examples.

    The scores of a checkpoint are known to the run when its next step is trained, or
    2 · `rollouts.lag` steps later, and that step is then the last.
    """

    when: str | None = None
    """A condition on what is measured, `METRIC >= NUMBER` with one of >=, >, <=, <: such as
    `held_out/reward/mean >= 0.95` or `held_out/loss < 0.2` (docs/evaluation.md)."""

    patience: int = Field(default=0, ge=0, le=10_000)
    """Evaluations in turn without a gain over the best one before them; 0 waits for none."""

    @field_validator("when")
    @classmethod
    def _condition_is_one(cls, when: str | None) -> str | None:
        if when is not None and not CONDITION.fullmatch(when):
            raise ValueError(
                f"{when!r} is no condition; give METRIC, one of >=, >, <=, <, and a number, such "
                f"as {MEASURED}reward/mean >= 0.95"
            )
        return when

    @property
    def is_given(self) -> bool:
        """Whether a run may end early."""
        return self.when is not None or self.patience > 0

    def met(self, measured: Mapping[str, float], *, first: bool) -> str:
        """Say that the condition holds for what was measured; empty if it does not.

        UserError if the `first` evaluation does not measure what it is about.
        """
        found = CONDITION.fullmatch(self.when) if self.when is not None else None
        if found is None:
            return ""
        metric, sign, number = found.group("metric", "sign", "number")
        if (value := measured.get(metric)) is None:
            if first:
                raise UserError(
                    f"stop.when {self.when}: {metric} is not measured, but "
                    f"{', '.join(measured)}{did_you_mean(metric, measured)}"
                )
            return ""
        return f"{metric} {value:.4g} {sign} {number}" if SIGNS[sign](value, float(number)) else ""
