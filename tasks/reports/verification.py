"""Verification of a run: every file is as it was written, and every step has its files.

What must be there is said by the table of stages with the manifest, the updates and the metrics. Of
a step under way, and of what follows it, nothing has to be there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, Self

import pyarrow.parquet as pq

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.roles import answerers, policy_of
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.tinker.engines import LOCAL, needs_engine, weights_record
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.metrics import name_metrics
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.spans import rows_of
from ratchet.tasks.recording.step_log import Metrics, read_metrics
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


def find_damage(run: RunFolder) -> Iterator[str]:
    """Yield what is damaged or missing in a run, a sentence each; nothing changes.

    The engine's own files are not checked, but for the records of the run's checkpoints.
    """
    readable = set[Path]()
    for path in run.files():
        try:
            yield from _read(path)
            readable.add(path)
        except UserError as error:
            yield str(error)
        except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
            said = error.strerror if isinstance(error, OSError) else error
            yield f"{path} is damaged: it cannot be read ({said}). {remedy(path)}"
    if not is_file(run.manifest):
        yield f"{run.manifest} is missing. {remedy(run.manifest)}"
    elif run.manifest in readable:
        with suppress(UserError):  # the manifest is of another format
            yield from dict.fromkeys(_Recorded.read(run, readable).faults())


def _read(path: Path) -> Iterator[str]:
    """Read a file, or what stands in its place; yield that it is torn, or no file of a run."""
    form = FORMS.get(path.name) or FORMS.get(path.parent.name)
    if form is None:
        yield f"{path} is not a file of a run"
        return
    READERS[form](path)
    if form in ("log", "journal") and read_bytes(path)[-1:] not in (b"", b"\n"):
        yield (
            f"{path} is torn: its last line is not whole, since its end, or the writing of it, "
            "was cut off. Resume the run: the line is cut, and what it said is made again"
        )


@dataclass(frozen=True)
class _Recorded:
    """Record of a run: its manifest and metrics, and each policy's updated steps.

    Of the run's files only the `readable` are read.
    """

    run: RunFolder
    readable: Set[Path]
    manifest: Mapping[str, Any]
    rows: Sequence[Metrics]
    updated: Mapping[str, Set[int]]

    @classmethod
    def read(cls, run: RunFolder, readable: Set[Path]) -> Self:
        manifest = read_manifest(run)
        rows = read_metrics(run.metrics) if run.metrics in readable else []
        trained = map(policy_of, answerers(manifest["recipe"].get("roles", {})).values())
        policies = dict.fromkeys([POLICY, *filter(None, trained)])
        updated = {policy: {*range(len(rows)), *run.updated(policy)} for policy in policies}
        return cls(run, readable, manifest, rows, updated)

    @property
    def done(self) -> int:
        return max((step + 1 for steps in self.updated.values() for step in steps), default=0)

    def faults(self) -> Iterator[str]:
        """Yield a sentence for what a file lacks, and for each file that is not there."""
        run, measured = self.run, len(self.rows)
        if self.done > measured + 1:
            yield (
                f"{run.metrics} has {counted(measured, 'step')}, and {self.done} were updated. "
                f"{remedy(run.metrics)}"
            )
        for path, why in chain(self._of_steps(), self._of_batches(), self._of_shards()):
            if not is_file(path):
                yield f"{path} is missing, and {why}"
        for policy in self.updated:
            if run.checkpoints(policy) in self.readable:
                yield from self._of_checkpoints(policy)
        for batch in sorted(run.sealed_batches() & run.begun_batches()):
            journal, spans = run.journal(batch), run.spans(batch)
            if {journal, spans} <= self.readable:
                kept = len(rows_of(read_journal(journal)))
                if kept < (rows := pq.read_metadata(spans).num_rows):
                    yield (
                        f"{journal} has {counted(kept, 'row')}, and {spans} has {rows} of it: its "
                        "end is cut off. Restore the file from a copy"
                    )

    def _of_steps(self) -> Iterator[tuple[Path, str]]:
        """Yield the files of the steps that are done, and why each must be there."""
        run, done = self.run, self.done
        for stage, policy in product(STAGES, self.updated if done else ()):
            if stage.per == "run" and self._shows(stage, policy, self.rows):
                yield run.file_of(stage, policy), f"the run has done {counted(done, 'step')}"
            for step in sorted(self.updated[policy]) if stage.per == "step" else ():
                if self._shows(stage, policy, self.rows[step : step + 1]):
                    yield run.file_of(stage, policy, step), f"step {step} was done"
        for step, row in enumerate(self.rows, 1):
            if any(name.startswith("test/") for name in row):
                yield run.measure(0), f"checkpoint {step} was measured"
                yield run.measure(step), f"checkpoint {step} was measured"

    def _shows(self, stage: StageFiles, policy: str, rows: Sequence[Metrics]) -> bool:
        """Tell whether the flow, or a metric of some steps, shows that a stage has a file."""
        if stage.when is None or stage.when in ("", self.manifest["recipe"]["flow"]):
            return stage.when is not None
        return any({*name_metrics(policy, {stage.when: 0.0})} & {*row} for row in rows)

    def _of_batches(self) -> Iterator[tuple[Path, str]]:
        """Yield the files of batches that were sealed, or begun."""
        sealed = self.run.sealed_batches()
        for batch in sorted(sealed | self.run.begun_batches()):
            yield self.run.shard(parse_batch(batch).shard), f"its batch {batch} was begun"
            if batch in sealed:
                yield self.run.journal(batch), f"{self.run.spans(batch)} is made of it"

    def _of_shards(self) -> Iterator[tuple[Path, str]]:
        """Yield the shards that were played, their batches, and their evaluations."""
        run, parent = self.run, self.manifest.get("parent") or {"how": FORK, "step": 0}
        recipe = self.manifest["recipe"]
        if recipe["flow"] != PLAYED:
            return
        for step in range(self.done):
            yield run.shard(shard_name("train", step)), f"step {step} was done"
        due = range(parent["step"], len(self.rows) - recipe["rollouts"]["lag"])
        for path in run.shards():
            one = parse_batch(batch_name(path.stem, 0))
            split, dot, tag = one.split.partition(".")
            scores = run.evaluation(f"{one.step:05d}{dot}{tag}")
            if split == "test" and not tag and one.step in due and parent["how"] == FORK:
                yield scores, f"checkpoint {one.step} was evaluated"
            played = one.step < self.done if one.split in TRAINED_SPLITS else is_file(scores)
            if played and path in self.readable:
                for number in {row["batch"] for row in read_shard(path) if not row["round"]}:
                    yield run.spans(batch_name(path.stem, number)), f"{path} was played"

    def _of_checkpoints(self, policy: str) -> Iterator[str]:
        """Yield the checkpoints that a ledger, or the engine, does not have."""
        run, path = self.run, self.run.checkpoints(policy)
        ledger, base = Ledger(path), self.manifest["recipe"]["model"]["base"]
        saved = {one.step: one for one in ledger.checkpoints()}
        owned = is_file(run.owners) and read_bytes(run.owners)
        if not owned and any("epoch" in row for row in read_log(path)):
            yield f"{run.owners} is missing or empty. {remedy(run.owners)}"
        for step in {0, *(one + 1 for one in self.updated[policy])} if self.done else ():
            if step not in saved and not ledger.is_deleted(step):
                yield f"{path} has no checkpoint {step}, and it was made"
        if is_written(run.engine) or (base.startswith(LOCAL) and needs_engine(base)):
            for step, one in saved.items():
                for address in filter(None, (one.sampler, one.state)):
                    if not is_file(record := weights_record(run.engine, address)):
                        yield f"{record} is missing, and checkpoint {step} was saved"
