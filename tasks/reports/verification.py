"""Verification of a run: every file as it was written, and no file missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from adapters.errors import UserError
from tasks.checkpoints import Ledger
from tasks.metrics import read_metrics
from tasks.recording.journal import read_journal
from tasks.storage.checksums import verified
from tasks.storage.files import is_written, read_bytes
from tasks.storage.json_files import read_json, read_log, read_rows
from tasks.storage.run_folder import LEARNING, TEXT_TEACHERS, RunFolder

GIVEN = (
    *("texts.parquet", TEXT_TEACHERS, "expert_texts.parquet"),
    *("pairs.parquet", "pair_references.parquet", "reference_parts"),
)
FILES: Mapping[Callable[[Path], object], Sequence[str]] = {
    read_json: ("manifest.json", "updates", "evaluations", "measures"),
    read_log: ("owners.jsonl", "metrics.jsonl", "arrivals.jsonl", "checkpoints.jsonl"),
    read_rows: ("shards",),
    read_journal: ("journal", "stopped"),
    verified: (*GIVEN, "spans", *(name for name in LEARNING if name != "updates")),
    read_bytes: ("games",),  # which are for others to read
}
"""Reader → the files that it reads, by their own names or by that of their folder."""
READERS = {name: reader for reader, names in FILES.items() for name in names}


def find_damage(run: RunFolder) -> Iterator[str]:
    """Yield what is damaged or missing in a run, a sentence each; nothing changes.

    The engine's own files are not looked at.
    """
    for path in run.files():
        reader = READERS.get(path.name) or READERS.get(path.parent.name)
        if reader is None:
            yield f"{path} is not a file of a run"
            continue
        try:
            reader(path)
        except UserError as error:
            yield str(error)
    try:
        yield from _missing(run)
    except UserError:
        return  # told above: a log that says which files there should be is damaged


def _missing(run: RunFolder) -> Iterator[str]:
    played = any(run.all_spans()) and not run.given_files()
    of_step = [*([run.trajectories, run.rewards] if played else []), run.datums, run.update]
    for step in range(len(read_metrics(run.metrics))):
        for policy in run.policies():
            for path in (of_policy(policy, step) for of_policy in of_step):
                if not is_written(path):
                    yield f"{path} is missing, and step {step} was done"
            if Ledger(run.checkpoints(policy)).find(step + 1) is None:
                yield f"{run.checkpoints(policy)} has no checkpoint {step + 1}, and it was made"
