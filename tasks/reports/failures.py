"""spans → what failed in them: each error whole, with the rollouts that it ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.recording.spans import ERROR, PLACE, REFUSED
from tasks.recording.step_log import read_metrics
from tasks.recording.views import Views
from tasks.storage.arrivals import batches_of
from tasks.storage.checksums import verified
from tasks.storage.files import is_written
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside, select

QUERY = query_beside(__file__)


@dataclass(frozen=True)
class RecordedFailure:
    """An error: its whole text, how often it occurred, and in which rollouts, in words.

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
    """Read the errors of sealed batches, the latest first; those at one place are one failure."""
    batches = "with spans as (select * from parquet_rows($spans)) "
    rows = select(batches + QUERY, spans=[verified(path) for path in spans], place=PLACE)
    return [RecordedFailure(**row) for row in rows.to_pylist()]


def find_failures(views: Views) -> list[RecordedFailure]:
    """Find the errors in the view `spans`, as `read_failures` does."""
    rows = views.sql(QUERY, params={"place": PLACE}).to_arrow_table()
    return [RecordedFailure(**row) for row in rows.to_pylist()]


def ask_failures(run: str) -> str:
    """Return the command that lists the failed rollouts of a run by its name, with their errors."""
    return f"ratchet sql --run {run} 'from failures'"


def last_failure(run: RunFolder) -> RecordedFailure | None:
    """Return the last error of the last step in which rollouts failed; None if there is none.

    The step that is under way, or at which the run was stopped, counts as far as it is sealed.
    """
    rows = read_metrics(run.metrics)
    failed = [int(row["step"]) for row in rows if row.get("rollouts/failed")]
    for step in (len(rows), *failed[-1:]):
        spans = [path for path in map(run.spans, batches_of(run, step)) if is_written(path)]
        for failure in read_failures(spans) if spans else ():
            if failure.kind == ERROR:
                return failure
    return None
