"""Verification of a run: every file that must be there, and every file as it was written.

What must be there is said by the manifest, the updates and the metrics, not by the files that are
found. Of a step under way, and of what follows it, nothing has to be there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from adapters.calls import POLICY
from adapters.door.roles import answerers, policy_of
from adapters.errors import UserError, counted
from adapters.tinker.engines import LOCAL, needs_engine, weights_record
from tasks.algorithm.preferences import PREFERENCES
from tasks.checkpoints import Ledger
from tasks.given.texts import Texts
from tasks.metrics import name_metrics
from tasks.recording.journal import read_journal
from tasks.recording.spans import rows_of
from tasks.recording.step_log import Metrics, read_metrics
from tasks.shards import read_shard
from tasks.storage.files import (
    is_file,
    is_written,
    read_bytes,
    read_json,
    read_rows,
    remedy,
    verified,
)
from tasks.storage.logs import read_log
from tasks.storage.manifest import FORK, REPLAY, lineage, read_manifest
from tasks.storage.names import EXAMINER, JUDGE, batch_name, parse_batch, shard_name
from tasks.storage.run_folder import LEARNING, TEXT_TEACHERS, TRAINED_SPLITS, RunFolder

GIVEN_FILES = (
    *("texts.parquet", TEXT_TEACHERS, "expert_texts.parquet"),
    *("pairs.parquet", "pair_references.parquet", "reference_parts"),
)
LOGS = ("owners.jsonl", "metrics.jsonl", "work.jsonl", "checkpoints.jsonl")
FILES: Mapping[Callable[[Path], object], Sequence[str]] = {
    read_json: (
        "manifest.json",
        "service.json",
        "end.json",
        "updates",
        "evaluations",
        "measures",
    ),
    read_log: LOGS,
    read_rows: ("shards",),
    read_journal: ("journal", "stopped"),
    verified: (*GIVEN_FILES, "spans", *(name for name in LEARNING if name != "updates")),
}
"""Reader → the files that it reads, by their own names or by their folder's name."""
FILE_READERS = {name: reader for reader, names in FILES.items() for name in names}
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
    told = set[str]()
    with suppress(*DAMAGED_FILE):  # the manifest is damaged, which is told above
        for sentence in _Recorded(run).missing():
            if sentence not in told:
                told.add(sentence)
                yield sentence


def _damage_of(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file, or with what stands in its place."""
    name = path.name if path.name in FILE_READERS else path.parent.name
    reader = FILE_READERS.get(name)
    if reader is None:
        yield f"{path} is not a file of a run"
        return
    try:
        reader(path)
        if reader in (read_log, read_journal) and read_bytes(path)[-1:] not in (b"", b"\n"):
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
    """Record of a run: it tells what files the run must have."""

    run: RunFolder

    def missing(self) -> Iterator[str]:
        """Yield a sentence for each file that is not there, and for what a file lacks."""
        yield from self._of_logs()
        if self.done:
            yield from self._given()
        for step in range(self.done):
            for policy in self._trained(step):
                yield from self._learned(step, policy)
            if self._recipe(step).get("agent"):
                yield from self._played(step)
        for policy in self.policies:
            yield from self._saved(policy)
        yield from self._of_batches()
        yield from self._measured()
        yield from self._evaluated()

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        return read_manifest(self.run)

    @cached_property
    def eras(self) -> Sequence[tuple[int, Mapping[str, Any]]]:
        return lineage(self.run)

    @cached_property
    def parent(self) -> Mapping[str, Any]:
        return self.manifest.get("parent") or {"how": "", "step": 0}

    @cached_property
    def rows(self) -> Sequence[Metrics]:
        """Metrics of the steps that are done; an empty list if they cannot be read."""
        with suppress(*DAMAGED_FILE):
            return read_metrics(self.run.metrics)
        return []

    @cached_property
    def steps(self) -> int:
        """Steps of the finished run; as many as are planned if its end cannot be read."""
        planned: int = self.manifest["recipe"]["steps"]
        with suppress(*DAMAGED_FILE):
            return self.run.steps_of(planned)
        return planned

    @cached_property
    def policies(self) -> list[str]:
        roles = answerers(self.manifest["recipe"].get("roles", {}))
        trained = (policy_of(who) for who in roles.values())
        return [*dict.fromkeys([POLICY, *filter(None, trained)])]

    @cached_property
    def done(self) -> int:
        """Steps whose update of a policy is made."""
        steps = (step for policy in self.policies for step in self.run.updated(policy))
        return max([len(self.rows), *(step + 1 for step in steps)])

    def _recipe(self, step: int) -> Mapping[str, Any]:
        return next(recipe for first, recipe in reversed(self.eras) if first <= step)

    def _trained(self, step: int) -> list[str]:
        """List the policies whose update of a step was made."""
        measured = step < len(self.rows)
        return [p for p in self.policies if measured or is_file(self.run.update(p, step))]

    def _of_logs(self) -> Iterator[str]:
        run, measured = self.run, len(self.rows)
        if self.done > measured + 1 or (self.done and not is_file(run.metrics)):
            yield (
                f"{run.metrics} has {counted(measured, 'step')}, and {self.done} were updated. "
                f"{remedy(run.metrics)}"
            )
        with suppress(*DAMAGED_FILE):
            saved = (row for policy in self.policies for row in read_log(run.checkpoints(policy)))
            if any("epoch" in row for row in saved) and not read_log(run.owners):
                yield f"{run.owners} is missing or empty. {remedy(run.owners)}"

    def _given(self) -> Iterator[str]:
        """Yield what is missing of the texts or pairs that a run learns."""
        run, recipe = self.run, self.manifest["recipe"]
        needed: list[Path] = []
        match recipe.get("flow"):
            case "finetune":
                needed = [run.texts]
                if (recipe.get("teacher") or {}).get("model") and is_file(run.texts):
                    with suppress(*DAMAGED_FILE):
                        needed += Texts(run.texts, run.text_teacher).parts()
            case "prefer":
                scored = PREFERENCES[recipe["preference"]["loss"]].reference
                needed = [run.pairs, *([run.pair_references] if scored else [])]
        if any(key.startswith("expert/") for row in self.rows for key in row):
            needed.append(run.expert_texts)
        yield from _absent(needed, "the run learns from it")

    def _learned(self, step: int, policy: str) -> Iterator[str]:
        """Yield what is missing of what a policy made of a step."""
        run, row = self.run, self.rows[step] if step < len(self.rows) else {}
        played = bool(self._recipe(step).get("agent"))
        files = [run.datums(policy, step), run.update(policy, step)]
        if played:
            files = [run.trajectories(policy, step), run.rewards(policy, step), *files]
            beside = {
                "kl_reference_v1": run.references(policy, step),
                "teacher/kl": run.references(policy, step, "teachers"),
                "expert/tokens": run.expert(policy, step),
            }
            named = name_metrics(policy, dict.fromkeys(beside, 0.0))
            files += [
                path for name, path in zip(named, beside.values(), strict=True) if name in row
            ]
            files += [run.verdicts(step)] if "judge/failed" in row and policy == POLICY else []
        yield from _absent(files, f"step {step} was done")

    def _played(self, step: int) -> Iterator[str]:
        """Yield what is missing of the batches that a step is made of."""
        run = self.run
        shard = run.shard(shard_name("train", step))
        yield from _absent([shard], f"step {step} was done")
        batches = self._batches_of(shard, first=True)
        if step < len(self.rows) and "judge/failed" in self.rows[step]:
            batches += self._batches_of(run.shard(shard_name(JUDGE, step)))
        yield from _absent(map(run.spans, batches), f"step {step} was done")

    def _batches_of(self, shard: Path, *, first: bool = False) -> list[str]:
        """List the batches of a shard, or of its first round; [] if the shard is damaged."""
        with suppress(*DAMAGED_FILE):
            rows = read_shard(shard)
            numbers = {row["batch"] for row in rows if not (first and row["round"])}
            return [batch_name(shard.stem, number) for number in sorted(numbers)]
        return []

    def _of_batches(self) -> Iterator[str]:
        """Yield what is missing of batches that were sealed, or begun."""
        run = self.run
        sealed, journals = ({path.stem for path in paths} for paths in run.all_spans())
        for batch in sorted(sealed | journals):
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

    def _saved(self, policy: str) -> Iterator[str]:
        """Yield the checkpoints that a ledger, or the engine, does not have."""
        run, path = self.run, self.run.checkpoints(policy)
        if not is_file(path):
            if self.done:
                yield f"{path} is missing. {remedy(path)}"
            return
        with suppress(*DAMAGED_FILE):
            ledger = Ledger(path)
            for step in range(self.done + 1):
                made = step == 0 or policy in self._trained(step - 1)
                if made and ledger.find(step) is None and not ledger.is_deleted(step):
                    yield f"{path} has no checkpoint {step}, and it was made"
            base = self.manifest["recipe"]["model"]["base"]
            if is_written(run.engine) or (base.startswith(LOCAL) and needs_engine(base)):
                for saved in {one.step: one for one in ledger.checkpoints()}.values():
                    addresses = filter(None, (saved.sampler, saved.state))
                    records = (weights_record(run.engine, address) for address in addresses)
                    yield from _absent(records, f"checkpoint {saved.step} was saved")

    def _measured(self) -> Iterator[str]:
        """Yield the measures on held-out texts or pairs that are missing."""
        if self.manifest["recipe"].get("flow") not in ("finetune", "prefer") or not self.rows:
            return
        scored = [any(name.startswith("test/") for name in row) for row in self.rows]
        for step in (0, *(step + 1 for step, found in enumerate(scored) if found)):
            yield from _absent([self.run.measure(step)], f"checkpoint {step} was measured")

    def _evaluated(self) -> Iterator[str]:
        """Yield what is missing of evaluations that were scored, or played to their end."""
        run, parent = self.run, self.parent
        scored = {path.stem for path in run.evaluations()}
        for name in self._due() | self._played_whole():
            yield from _absent([run.evaluation(name)], f"checkpoint {int(name[:5])} was evaluated")
        for name in sorted(scored):
            step, tag = int(name.partition(".")[0]), name[len(name.partition(".")[0]) :]
            if parent["how"] == REPLAY and step == 0:
                continue  # shared by the parent, without its rollouts
            with suppress(*DAMAGED_FILE):
                for how in read_json(run.evaluation(name)):
                    split = {"greedy": "greedy", "judged": EXAMINER}.get(how, "test")
                    shard = run.shard(shard_name(f"{split}{tag}", step))
                    # The judge of pairs sees nothing of checkpoint 0, with which it compares.
                    needed = [] if how == "judged" else [shard]
                    spans = map(run.spans, self._batches_of(shard))
                    yield from _absent([*needed, *spans], f"{run.evaluation(name)} is made of it")

    def _due(self) -> set[str]:
        """Name the evaluations that a run must have scored, by its recipe."""
        recipe, first = self.manifest["recipe"], self.parent["step"]
        if not recipe.get("agent") or self.parent["how"] == REPLAY or len(self.rows) <= first:
            return set()
        every, last = recipe["evaluation"]["every"], len(self.rows) - recipe["rollouts"]["lag"]
        first = first if self.parent["how"] == FORK else 0
        due = (s for s in range(first, last) if s == 0 or (every and s % every == 0))
        return {f"{step:05d}" for step in due}

    def _played_whole(self) -> set[str]:
        """Name the evaluations whose rollouts are sealed, and which nothing else waits for."""
        run, finished = self.run, len(self.rows) >= self.steps
        shards: dict[str, list[Path]] = {}
        for path in run.shards():
            named = parse_batch(batch_name(path.stem, 0))
            if named.split not in TRAINED_SPLITS:
                tag = named.split.partition(".")[1] + named.split.partition(".")[2]
                shards.setdefault(f"{named.step:05d}{tag}", []).append(path)
        return {
            name
            for name, of in shards.items()
            if (finished or not name.isdecimal())
            and any(path.stem.startswith("test") for path in of)
            and all(is_file(run.spans(b)) for path in of for b in self._batches_of(path))
        }


def _absent(paths: Iterator[Path] | Sequence[Path], why: str) -> Iterator[str]:
    for path in paths:
        if not is_file(path):
            yield f"{path} is missing, and {why}"
