"""Comparison of a killed run with its reference, and counts of what was done more than once.

Everything is read from the run's journals, ledgers, files and optimizer states.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import pyarrow.parquet as pq
from safetensors.numpy import load_file

from ratchet.flows.checkpoints.binding import find_start
from ratchet.flows.recipe.loading import read_recipe
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.spans import BEGUN, ERROR, LLM, REWARD, Span
from ratchet.tasks.recording.step_log import Metrics, read_metrics
from ratchet.tasks.recovery.recorded_steps import datum_files
from ratchet.tasks.storage.names import JUDGE, batch_name, parse_batch
from ratchet.tasks.storage.plan_record import child_runs
from ratchet.tasks.storage.run_folder import RunFolder

CLOCKS = re.compile(r"(policies/\w+/)?(seconds|recall|spent)/")
"""Metrics that two equal runs may differ in."""
SIGNS_OF_KILLS = ("rollouts/retried", "calls/lost")
"""Metrics that count interruptions."""

REPETITIONS = ("finished_rerun", "applied_twice", "sampled_twice")
"""Counts that must be 0."""

STAGES = ("assembly", "update", "metrics")
"""Stages of a step that follow its rollouts."""

Json = dict[str, object]
Digests = dict[str, str]
"""File name → SHA-256."""


class Contents(TypedDict):
    """What two runs of a recipe share to the bit; lists have an entry for each policy."""

    weights: list[str]
    optimizer: list[str]
    datums: list[Digests]
    metrics: list[Metrics]
    evaluations: Digests
    measures: Digests


@dataclass(frozen=True)
class Counts:
    """What a run did more often than once, or lost."""

    finished_rerun: int
    """Attempts at a rollout that had already ended with a reward or an error."""
    applied_twice: int
    """Optimizer steps of a saved state that its datum files do not explain, over all states."""
    sampled_twice: int
    """Sampled tokens of calls whose answer an earlier attempt had recorded."""
    recalled: int
    """Tokens of answers that were given again from the journal."""
    lost: int
    """Calls that were begun and never answered."""
    rebuilt: int
    """Checkpoints that were saved again."""


def count_repetitions(run: RunFolder) -> Counts:
    """Count what a finished run, or each of its stages, repeated and lost."""
    counts = [asdict(_count_repetitions(one)) for one in parts_of(run)]
    return Counts(**{name: sum(one[name] for one in counts) for name in counts[0]})


def _count_repetitions(run: RunFolder) -> Counts:
    spans = [span for path in journals(run) for span in read_journal(path)]
    calls = [span for span in spans if span["kind"] == LLM]
    steps = [[checkpoint.step for checkpoint in saved(run, name)] for name in run.policies()]
    return Counts(
        finished_rerun=count_finished_rerun(spans),
        applied_twice=sum(abs(extra) for extra in extra_optimizer_steps(run).values()),
        sampled_twice=count_sampled_twice(calls),
        recalled=sum(_tokens(span) for span in calls if span["recalled"]),
        lost=len(_places(spans, BEGUN) - _places(spans, LLM)),
        rebuilt=sum(len(of_policy) - len({*of_policy}) for of_policy in steps),
    )


def count_finished_rerun(spans: Sequence[Span]) -> int:
    """Count the attempts that came after the end of their rollout."""
    ended: dict[str, int] = {}
    attempts = defaultdict[str, set[int]](set)
    for span in spans:
        name, attempt = span["rollout_id"], span["attempt"]
        attempts[name].add(attempt)
        if span["kind"] in (REWARD, ERROR):
            ended[name] = min(ended.get(name, attempt), attempt)
    return sum(attempt > end for name, end in ended.items() for attempt in attempts[name])


def count_sampled_twice(calls: Sequence[Span]) -> int:
    """Count the tokens of every sampling of a call but the first."""
    sampled = defaultdict[tuple[str, str, int], list[int]](list)
    for span in sorted(calls, key=lambda span: span["attempt"]):
        if not span["recalled"]:
            sampled[span["rollout_id"], span["role"], span["call"]].append(_tokens(span))
    return sum(sum(again) for _, *again in sampled.values())


def extra_optimizer_steps(run: RunFolder) -> dict[str, int]:
    """Map each saved state to its optimizer's steps less those of the datum files before it."""
    extra, recipe = {}, read_recipe(run)
    method = recipe.update_method()
    for policy in run.policies():
        start = find_start(recipe, run, policy)
        earlier = start.optimizer_steps or 0 if start else 0
        for checkpoint in saved(run, policy):
            if checkpoint.state is None:
                continue
            counts = (
                max(
                    pq.read_metadata(path).num_rows
                    for path in datum_files(run, policy, step, method)
                )
                for step in range(checkpoint.step)
            )
            expected = earlier + sum(map(method.optimizer_steps, counts))
            optimizer = load_file(state_folder(run, checkpoint.state) / "optimizer.safetensors")
            extra[checkpoint.state] = int(optimizer["step"]) - expected
    return extra


def read_contents(run: RunFolder) -> Contents:
    """Read the final states, datums, metrics and evaluations of a finished run, or its stages."""
    first, *others = [_read_contents(one) for one in parts_of(run)]
    for number, more in enumerate(others, start=2):
        first["weights"] += more["weights"]
        first["optimizer"] += more["optimizer"]
        first["datums"] += more["datums"]
        first["metrics"] += more["metrics"]
        for name in ("evaluations", "measures"):
            first[name] |= {f"{number}/{file}": digest for file, digest in more[name].items()}
    return first


def _read_contents(run: RunFolder) -> Contents:
    final = [state_folder(run, _last_state(run, policy)) for policy in run.policies()]
    return {
        "weights": [_digest(folder / "adapter_model.safetensors") for folder in final],
        "optimizer": [_digest(folder / "optimizer.safetensors") for folder in final],
        "datums": [
            _digests(of(name, 0).parent, "*.parquet")
            for name in run.policies()
            for of in (run.datums, run.expert)
        ],
        "metrics": [_without_clocks(row) for row in read_metrics(run.metrics)],
        "evaluations": _digests(run.path / "evaluations", "*.json"),
        "measures": _digests(run.path / "measures", "*.json"),
    }


def differing_parts(run: Contents, reference: Contents) -> list[str]:
    """Name the parts that differ."""
    return [name for name in reference if run[name] != reference[name]]


def list_faults(run: RunFolder, reference: Contents) -> list[str]:
    """List where a finished run differs from its reference, and what it has repeated."""
    counts = asdict(count_repetitions(run))
    return [
        *(f"differs in {part}" for part in differing_parts(read_contents(run), reference)),
        *(f"has {name} = {counts[name]}" for name in REPETITIONS if counts[name]),
    ]


def seconds_to_first_token(run: RunFolder, after: float) -> float | None:
    """Return the seconds from `after` (Unix time) to the end of the first call sampled since.

    None if no call was sampled since.
    """
    ends = [
        span["ended"].timestamp()
        for one in parts_of(run)
        for path in journals(one)
        if path.stat().st_mtime >= after
        for span in read_journal(path)
        if span["kind"] == LLM and not span["recalled"]
    ]
    return min((end - after for end in ends if end >= after), default=None)


def stage_of(run: RunFolder) -> str:
    """Tell from a run's folder, or the last of its stages', what it was doing when killed."""
    run = parts_of(run)[-1]
    if any(Ledger(run.checkpoints(name)).in_doubt() is not None for name in run.policies()):
        return "update"
    unsealed = [batch for shard in _stems(run, "shards") for batch in _unsealed(run, shard)]
    if unsealed:
        splits = {"train": "rollouts", JUDGE: "judging"}
        return splits.get(parse_batch(unsealed[0]).split, "evaluation")
    shards = [name for name in _stems(run, "shards") if name.startswith("train")]
    counts = [len(shards), len(_stems(run, "datums")), len(_stems(run, "updates"))]
    counts.append(len(read_metrics(run.metrics)))
    for (before, after), name in zip(pairwise(counts), STAGES, strict=True):
        if before > after:
            return name
    return "between"


def parts_of(run: RunFolder) -> list[RunFolder]:
    """List the runs of a run's stages; the run itself if it has none."""
    return child_runs(run) or [run]


def journals(run: RunFolder) -> list[Path]:
    """List the journals of all rollout batches."""
    return sorted((run.path / "journal").glob("*.jsonl"))


def saved(run: RunFolder, policy: str) -> list[Checkpoint]:
    """List the saved checkpoints of a policy."""
    return Ledger(run.checkpoints(policy)).checkpoints()


def state_folder(run: RunFolder, address: str) -> Path:
    """Return the folder in which the engine keeps the tensors of a saved state."""
    found = list((run.engine / "tensors").glob(f"{address.removeprefix('tinker://')}.*"))
    if len(found) != 1:
        raise SystemExit(f"{run.path} has {len(found)} folders of the state {address}, not 1")
    return found[0]


def read_json_lines(path: Path) -> list[Json]:
    """Read the whole lines of a file; none if there is no file."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _unsealed(run: RunFolder, shard: str) -> Iterator[str]:
    for number in sorted({row["batch"] for row in read_shard(run.shard(shard))}):
        if not run.spans(batch_name(shard, number)).exists():
            yield batch_name(shard, number)


def _last_state(run: RunFolder, policy: str) -> str:
    return [checkpoint.state for checkpoint in saved(run, policy) if checkpoint.state][-1]


def _tokens(span: Span) -> int:
    return len(span["response_token_ids"])


def _places(spans: Sequence[Span], kind: str) -> set[tuple[object, ...]]:
    names = ("rollout_id", "attempt", "role", "call")
    return {tuple(span[name] for name in names) for span in spans if span["kind"] == kind}


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _digests(folder: Path, pattern: str) -> Digests:
    return {path.name: _digest(path) for path in folder.glob(pattern)}


def _without_clocks(row: Mapping[str, float]) -> Metrics:
    return {k: v for k, v in row.items() if not CLOCKS.match(k) and k not in SIGNS_OF_KILLS}


def _stems(run: RunFolder, stage: str) -> list[str]:
    return sorted(path.stem for path in (run.path / stage).glob("[!.]*"))
