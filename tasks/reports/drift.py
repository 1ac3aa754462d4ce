"""Token drift: in how many turns the history's sampled tokens were kept exactly."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tasks.storage.tables import arrays, read
from tasks.trajectories import LISTS


@dataclass(frozen=True)
class TokenDrift:
    """Token drift of a trained role. A turn is a call with an earlier answer in its messages.

    If the tokens of that answer are not those that were sampled, the trajectory ends; `broken`
    counts such turns by reason (`tasks.trajectories.assemble` names the reasons).
    """

    role: str
    turns: int
    kept: int
    broken: Mapping[str, int]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} by {reason}" for reason, count in self.broken.items())
        if not self.turns:
            return f"{self.role}: no call had a history"
        return (
            f"{self.role}: {self.kept} of {self.turns} turns kept the tokens that were sampled "
            f"({self.kept / self.turns:.0%}); broken: {reasons or 'none'}"
        )


def read_drift(trajectories: Path) -> list[TokenDrift]:
    """Return the drift of every role that is trained, by the role's name."""
    table = read(trajectories)
    trained = [bool(mask.any()) for mask in arrays(table["mask"])]
    rows = table.filter(pa.array(trained, pa.bool_())).drop_columns(list(LISTS)).to_pylist()
    return [
        _drift(role, [row for row in rows if row["role"] == role])
        for role in sorted({row["role"] for row in rows})
    ]


def _drift(role: str, trajectories: list[dict]) -> TokenDrift:
    reasons = Counter(row["begins"] for row in trajectories)
    begun = reasons.pop("new", 0)
    calls = sum(row["calls"] for row in trajectories)
    return TokenDrift(role, calls - begun, calls - len(trajectories), dict(sorted(reasons.items())))
