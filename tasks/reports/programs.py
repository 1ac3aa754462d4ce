"""Spans → what a program has asked: requests by dialect, tools, and the lengths of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.adapters.errors import listed
from ratchet.adapters.process.terminal import hanging
from ratchet.tasks.reports.tables import aligned
from ratchet.tasks.storage.files import verified
from ratchet.tasks.storage.tables import query_beside, select

QUERY = query_beside(__file__)
MOST_TOOLS = 60


@dataclass(frozen=True)
class Played:
    """Model of a dry run, by its base.

    It takes `context` tokens of a prompt and its answer, and has read texts of `read_context`
    tokens; None is not known. A `tiny` one is the model of Ratchet's own engine. If a stand-in has
    spoken in its place, `told` is what that reports.
    """

    base: str
    context: int | None = None
    read_context: int | None = None
    told: Sequence[str] | None = None
    tiny: bool = False

    def __str__(self) -> str:
        takes = "has no limit of tokens that is known here"
        if self.context is not None:
            takes = f"takes {self.context:,} tokens, a prompt and its answer together"
        read = "" if self.read_context is None else f", and has read texts of {self.read_context:,}"
        return f"{self.base} {takes}{read}"


def describe_program(spans: Sequence[Path], played: Played) -> str:
    """Describe what a program has asked in sealed batches, beside what its model takes."""
    rows = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    offered = {row["role"]: row.pop("tools") for row in rows}
    names = [name.replace("_", " ") for row in rows[:1] for name in row]
    lines = [
        aligned(names, [[*row.values()] for row in rows]) if rows else "no request was answered",
        *(
            hanging(f"the tools of {role}: {listed(tools, MOST_TOOLS)}")
            for role, tools in offered.items()
            if tools
        ),
        str(played),
    ]
    if played.told is not None:
        lines.append("a file has spoken in the model's place, and its tokenizer has counted")
        lines += map(hanging, played.told)
    return "\n".join(lines)
