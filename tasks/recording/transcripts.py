"""sealed batches → what was said in each rollout, and the errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ratchet.adapters.calls import POLICY
from ratchet.tasks.recording.spans import ERROR_PLACE, REFUSED
from ratchet.tasks.recording.views import Views
from ratchet.tasks.storage.files import query_beside, verified
from ratchet.tasks.storage.tables import select

QUERY = query_beside(__file__)
FAILURES_QUERY = query_beside(__file__, "failures")


class Transcript(TypedDict):
    """Rollout by the attempt that counts: its example, its end, and what was said in it.

    `error` is None unless the rollout failed; `rewarded_error` is the name of an error that has a
    reward. `turn_index` counts the policy's answers that called no tool, and `num_tool_calls` its
    tool calls. An interaction has the `role`, the last `question` and the `response`, with its tool
    calls as `name(arguments)`; a conversation has the `role`, the `messages` and the last `reply`
    as JSON; a refused call has the `role`, and `why`. The models were not shown `left_out_tools`,
    and had no setting for `left_out_fields`.
    """

    rollout_id: str
    example_id: int
    example: str
    reward: float | None
    error: str | None
    rewarded_error: str | None
    turn_index: int
    num_tool_calls: int
    interactions: Sequence[Mapping[str, str | None]]
    refused: Sequence[Mapping[str, str]]
    conversations: Sequence[Mapping[str, str]]
    left_out_tools: Sequence[str]
    left_out_fields: Sequence[str]


def describe_end(row: Transcript | Mapping[str, Any]) -> str:
    """Say how a rollout has ended: with its reward, its error, or neither."""
    if row["error"] is not None:
        return row["error"]
    by = f", for {row['rewarded_error']}" if row.get("rewarded_error") else ""
    return "no reward" if row["reward"] is None else f"reward {row['reward']:.4g}{by}"


def tell_rewarded(errors: Mapping[str, int]) -> str:
    """Say how many rollouts have the reward of an error, by the errors' names; empty if none."""
    told = ", ".join(f"{number} by {name}" for name, number in errors.items())
    return told and f"{told}, with its reward (rollouts.rewarded_errors)"


def tell_left_out(row: Transcript) -> list[str]:
    """Return a sentence about the tools that were left out, and one about the fields, if any."""
    told = {
        "tools that the model was not shown": row["left_out_tools"],
        "fields that changed nothing": row["left_out_fields"],
    }
    return [f"{what}: {', '.join(names)}" for what, names in told.items() if names]


def read_transcripts(spans: Sequence[Path]) -> list[Transcript]:
    """Read the rollouts of sealed batches, in order."""
    files = [verified(path) for path in spans]
    return select(QUERY, spans=files, policy=POLICY).to_pylist() if files else []


@dataclass(frozen=True)
class RecordedFailure:
    """An error: its whole text, how often it occurred, and its rollouts, in words.

    Its `kind` is `error` if it ended attempts, and `refused` if the door refused calls for it. The
    text has the commonest of the `messages` of its type at the same line of code.
    """

    kind: str
    error: str
    times: int
    messages: int
    rollouts: str

    def __str__(self) -> str:
        refused = ", a call that was refused" if self.kind == REFUSED else ""
        return f"{self.rollouts}{refused}{self.variety}:\n{self.error}"

    @property
    def variety(self) -> str:
        """Number of its messages, in words; empty if there is one."""
        return f", the commonest of {self.messages} messages" if self.messages > 1 else ""


def read_failures(spans: Sequence[Path]) -> list[RecordedFailure]:
    """Read the errors of sealed batches, the latest first; errors at one place are one failure."""
    if not spans:
        return []
    batches = "with spans as (select * from parquet_rows($spans)) "
    rows = select(
        batches + FAILURES_QUERY, spans=[verified(path) for path in spans], place=ERROR_PLACE
    )
    return [RecordedFailure(**row) for row in rows.to_pylist()]


def find_failures(views: Views) -> list[RecordedFailure]:
    """Find the errors in the view `spans`, as `read_failures` does."""
    rows = views.sql(FAILURES_QUERY, params={"place": ERROR_PLACE}).to_arrow_table()
    return [RecordedFailure(**row) for row in rows.to_pylist()]
