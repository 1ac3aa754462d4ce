"""The arrows of the path as Prefect tasks: called with a run's folder, each returns its file."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from adapters.calls import Sampling
from tasks.checkpoints import Checkpoint
from tasks.datums import Normalise, write_datums
from tasks.evaluations import score_spans, write_evaluation
from tasks.journal import seal
from tasks.metrics import COST, Metrics, divergence, measure, of_policy, record_metrics
from tasks.reports.games import write_games
from tasks.rollouts import Runner, plan
from tasks.shards import Source, choose, read_shard, write_shard
from tasks.storage.durability import durable
from tasks.storage.files import write_text
from tasks.storage.tables import read
from tasks.trajectories import write_trajectories
from tasks.updates import Learner

PAID = ("calls", "calls/other_roles", "tokens/prompt", "tokens/sampled", "seconds/sampling")
"""What sampling costs."""


@durable("shards/{batch}.jsonl", "shard {batch}")
def draw_shard(path: Path, batch: str, source: Source, seed: int, step: int, size: int) -> None:
    """dataset → shard."""
    write_shard(choose(source.examples(), seed, step, size), path)


@durable("spans/{batch}.parquet", "rollouts {batch}")
def collect_rollouts(
    path: Path,
    batch: str,
    runner: Runner,
    shard: Path,
    checkpoint: Checkpoint,
    group_size: int,
    sampling: Sampling,
    attempts: int = 1,
) -> None:
    """shard → rollouts → spans. What fails is played again, until it was `attempts` times."""
    journal = path.parents[1] / "journal" / f"{batch}.jsonl"
    while rollouts := plan(batch, read_shard(shard), group_size, journal, attempts):
        runner.collect(rollouts, journal, checkpoint, sampling)
    seal(journal, path)


@durable("trajectories/{step:05d}.parquet", "trajectories {step:05d}")
def assemble_trajectories(path: Path, step: int, spans: Path, trained_roles: Sequence[str]) -> None:
    """spans → trajectories."""
    write_trajectories(spans, path, trained_roles)


@durable("datums/{step:05d}.parquet", "datums {step:05d}")
def build_datums(
    path: Path,
    step: int,
    trajectories: Path,
    advantage: str,
    normalise: Normalise,
    smallest_group: int,
    discount: float,
) -> None:
    """trajectories × advantages → datums."""
    write_datums(trajectories, path, advantage, normalise, smallest_group, discount)


@durable("updates/{step:05d}.json", "update {step:05d}")
def update_policy(
    path: Path,
    step: int,
    learner: Learner,
    checkpoint: Checkpoint,
    datums: Path,
    with_state: bool,
) -> None:
    """checkpoint × datums → checkpoint. The file holds what the update measured."""
    started = time.monotonic()
    update = learner.update(checkpoint, datums, with_state=with_state)
    seconds = {"seconds/training": time.monotonic() - started}
    write_text(path, json.dumps({**divergence(datums, update.logprobs), **update.proof, **seconds}))


@durable("evaluations/{name}.json", "score {name}")
def score_rollouts(path: Path, name: str, batches: Mapping[str, Path], threshold: float) -> None:
    """rollouts of held-out examples → scores, by how they were sampled."""
    shards = path.parents[1] / "shards"
    scores = {
        how: score_spans(spans, shards / f"{spans.stem}.jsonl", threshold)
        for how, spans in batches.items()
    }
    write_evaluation(path, scores)


@durable("games/{batch}.jsonl", "games {batch}")
def list_games(
    path: Path, batch: str, spans: Path, columns: Sequence[str], threshold: float
) -> None:
    """rollouts of held-out examples → a line each, to be read one by one."""
    write_games(spans, path, columns, threshold)


def measure_step(
    policy: str,
    spans: Path,
    trajectories: Path,
    datums: Path,
    update: Path,
    smallest_group: int,
    trained_roles: Sequence[str],
    *,
    sampled: bool = True,
) -> Metrics:
    """Everything measured of a step: of its rollouts, and of what the policy made of them.

    Of another policy than the main one only its own, each name after `policies/<its name>/`. Where
    the rollouts were not `sampled` by this run, it is not this run that paid for them.
    """
    made = measure(spans, trajectories, datums, smallest_group, trained_roles)
    made["seconds/sampling"] = _seconds(spans)
    if not sampled:
        made |= {name: 0 for name in made if name in PAID or name.startswith(COST)}
    return of_policy(policy, {**made, **_measured(update)})


def record_step(folder: Path, step: int, metrics: Metrics) -> None:
    """What was measured, added to metrics.jsonl: with that the step is done."""
    record_metrics(folder / "metrics.jsonl", step, metrics)


def _measured(update: Path) -> Metrics:
    """Without the proof of a rebuild, which a run that was not interrupted does not have."""
    measured = json.loads(update.read_text())
    return {name: value for name, value in measured.items() if not name.startswith("probe/")}


def _seconds(spans: Path) -> float:
    """From the first call's start to the last rollout's end."""
    times = read(spans, columns=["started", "ended"])
    ended = times["ended"].drop_null()  # of a lost call there is none
    return (max(ended.to_pylist()) - min(times["started"].to_pylist())).total_seconds()
