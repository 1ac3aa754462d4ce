"""Verification of a run: every file that must be there, and every file as it was written.

What must be there is said by the table of stages with the manifest, the updates and the metrics. Of
a step under way, and of what follows it, nothing has to be there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.roles import answerers, policy_of
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.tinker.engines import LOCAL, needs_engine, weights_record
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.metrics import name_metrics
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.spans import rows_of
from ratchet.tasks.recording.step_log import Metrics, read_metrics
from ratchet.tasks.shards import read_shard
from ratchet.tasks.storage.files import (
    is_file,
    is_written,
    read_bytes,
    read_json,
    read_rows,
    remedy,
    verified,
)
from ratchet.tasks.storage.logs import read_log
from ratchet.tasks.storage.manifest import FORK, read_manifest
from ratchet.tasks.storage.names import batch_name, parse_batch, shard_name
from ratchet.tasks.storage.run_folder import TRAINED_SPLITS, RunFolder
from ratchet.tasks.storage.stages import PLAYED, STAGES, StageFiles

READERS: Mapping[str, Callable[[Path], object]] = {
    "json": read_json,
    "log": read_log,
    "rows": read_rows,
    "journal": read_journal,
    "parquet": verified,
}
"""Form of a stage's files → their reader, which raises UserError for damage."""
FORMS = {stage.name: stage.form for stage in STAGES}
DAMAGED_FILE = (UserError, OSError, ValueError)
"""Errors of a damaged file, which its own check reports; pyarrow's are ValueErrors."""


def find_damage(run: RunFolder) -> Iterator[str]:
    """Yield what is damaged or missing in a run, a sentence each; nothing changes.

    The engine's own files are not checked, but for the records of the run's checkpoints.
    """
    for path in run.files():
        yield from _damage_of(path)
    if not is_file(run.manifest):
        yield f"{run.manifest} is missing. {remedy(run.manifest)}"
        return
    with suppress(*DAMAGED_FILE):  # the manifest is damaged, which is told above
        yield from dict.fromkeys(_recorded(run).missing())


def _damage_of(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file, or with what stands in its place."""
    form = FORMS.get(path.name) or FORMS.get(path.parent.name)
    if form is None:
        yield f"{path} is not a file of a run"
        return
    try:
        READERS[form](path)
        if form in ("log", "journal") and read_bytes(path)[-1:] not in (b"", b"\n"):
            yield (
                f"{path} is torn: its last line is not whole, since its end, or the writing of it, "
                "was cut off. Resume the run: the line is cut, and what it said is made again"
            )
    except UserError as error:
        yield str(error)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        yield f"{path} is damaged: it cannot be read ({said}). {remedy(path)}"


@dataclass(frozen=True)
class _Recorded:
    """Record of a run: its manifest and metrics, and the steps of which a policy was updated."""

    run: RunFolder
    manifest: Mapping[str, Any]
    rows: Sequence[Metrics]
    updated: Mapping[str, set[int]]

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.manifest["recipe"]

    @property
    def done(self) -> int:
        return max((step + 1 for steps in self.updated.values() for step in steps), default=0)

    def missing(self) -> Iterator[str]:
        """Yield a sentence for each file that is not there, and for what a file lacks."""
        run, done, measured = self.run, self.done, len(self.rows)
        if done > measured + 1:
            yield (
                f"{run.metrics} has {counted(measured, 'step')}, and {done} were updated. "
                f"{remedy(run.metrics)}"
            )
        for stage, policy in product(STAGES, self.updated if done else ()):
            if stage.per == "run" and self._shows(stage, policy, self.rows):
                why = f"the run has done {counted(done, 'step')}"
                yield from _absent([run.file_of(stage, policy)], why)
            for step in sorted(self.updated[policy]) if stage.per == "step" else ():
                if self._shows(stage, policy, self.rows[step : step + 1]):
                    yield from _absent([run.file_of(stage, policy, step)], f"step {step} was done")
        for policy in self.updated:
            yield from self._saved(policy)
        yield from self._of_batches()
        yield from self._of_shards()
        for step, row in enumerate(self.rows):
            if any(name.startswith("test/") for name in row):
                measures = [run.measure(0), run.measure(step + 1)]
                yield from _absent(measures, f"checkpoint {step + 1} was measured")

    def _shows(self, stage: StageFiles, policy: str, rows: Sequence[Metrics]) -> bool:
        """Tell whether the flow, or a metric of some steps, shows that a stage has a file."""
        if stage.when is None or stage.when in ("", self.recipe["flow"]):
            return stage.when is not None
        return any({*name_metrics(policy, {stage.when: 0.0})} & {*row} for row in rows)

    def _saved(self, policy: str) -> Iterator[str]:
        """Yield the checkpoints that a ledger, or the engine, does not have."""
        run, path = self.run, self.run.checkpoints(policy)
        if not is_file(path):
            return
        with suppress(*DAMAGED_FILE):
            ledger = Ledger(path)
            saved = {one.step: one for one in ledger.checkpoints()}
            if any("epoch" in row for row in read_log(path)) and not read_log(run.owners):
                yield f"{run.owners} is missing or empty. {remedy(run.owners)}"
            for step in {0, *(one + 1 for one in self.updated[policy])} if self.done else ():
                if step not in saved and not ledger.is_deleted(step):
                    yield f"{path} has no checkpoint {step}, and it was made"
            base = self.recipe["model"]["base"]
            if is_written(run.engine) or (base.startswith(LOCAL) and needs_engine(base)):
                for step, one in saved.items():
                    addresses = filter(None, (one.sampler, one.state))
                    records = (weights_record(run.engine, address) for address in addresses)
                    yield from _absent(records, f"checkpoint {step} was saved")

    def _of_batches(self) -> Iterator[str]:
        """Yield what is missing of batches that were sealed, or begun."""
        run = self.run
        sealed, begun = run.sealed_batches(), run.begun_batches()
        for batch in sorted(sealed | begun):
            shard = run.shard(parse_batch(batch).shard)
            yield from _absent([shard], f"its batch {batch} was begun")
        for batch in sorted(sealed):
            journal, spans = run.journal(batch), run.spans(batch)
            yield from _absent([journal], f"{spans} is made of it")
            with suppress(*DAMAGED_FILE):
                kept = len(rows_of(read_journal(journal)))
                if kept < (rows := pq.read_metadata(verified(spans)).num_rows):
                    yield (
                        f"{journal} has {counted(kept, 'row')}, and {spans} has {rows} of it: its "
                        "end is cut off. Restore the file from a copy"
                    )

    def _of_shards(self) -> Iterator[str]:
        """Yield what is missing of the shards that were played, and of their evaluations."""
        run, parent = self.run, self.manifest.get("parent") or {"how": FORK, "step": 0}
        if self.recipe["flow"] != PLAYED:
            return
        for step in range(self.done):
            yield from _absent([run.shard(shard_name("train", step))], f"step {step} was done")
        due = range(parent["step"], len(self.rows) - self.recipe["rollouts"]["lag"])
        for path in run.shards():
            one = parse_batch(batch_name(path.stem, 0))
            split, dot, tag = one.split.partition(".")
            scores = run.evaluation(f"{one.step:05d}{dot}{tag}")
            if split == "test" and not tag and one.step in due and parent["how"] == FORK:
                yield from _absent([scores], f"checkpoint {one.step} was evaluated")
            trained = one.split in TRAINED_SPLITS
            if (trained and one.step < self.done) or (not trained and is_file(scores)):
                with suppress(*DAMAGED_FILE):
                    numbers = {row["batch"] for row in read_shard(path) if not row["round"]}
                    spans = [run.spans(batch_name(path.stem, number)) for number in sorted(numbers)]
                    yield from _absent(spans, f"{path} was played")


def _recorded(run: RunFolder) -> _Recorded:
    manifest, rows = read_manifest(run), list[Metrics]()
    with suppress(*DAMAGED_FILE):
        rows = read_metrics(run.metrics)
    trained = map(policy_of, answerers(manifest["recipe"].get("roles", {})).values())
    policies = dict.fromkeys([POLICY, *filter(None, trained)])
    updated = {policy: {*range(len(rows)), *run.updated(policy)} for policy in policies}
    return _Recorded(run, manifest, rows, updated)


def _absent(paths: Iterable[Path], why: str) -> Iterator[str]:
    for path in paths:
        if not is_file(path):
            yield f"{path} is missing, and {why}"
