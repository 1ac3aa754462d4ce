"""A step → its metrics: one flat row of numbers, under the field's names."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pyarrow as pa

from ratchet.adapters.calls import POLICY
from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.algorithm.advantages import is_uniform
from ratchet.tasks.algorithm.loss import Columns
from ratchet.tasks.algorithm.losses import complete_of, loss_of
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.checkpoints import sampled_step
from ratchet.tasks.datums import columns_of
from ratchet.tasks.recording.step_log import COST, REWARDED, Metrics
from ratchet.tasks.rewards import read_verdicts, rewards_of
from ratchet.tasks.scoring import TEACHER
from ratchet.tasks.storage.files import is_written, read_json, verified
from ratchet.tasks.storage.tables import arrays, flat_values, query_beside, read_table, select
from ratchet.tasks.trajectories import TRAINED_ROLES

QUERY = query_beside(__file__)

DATUM_LOGPROBS = "datums/logprobs"
"""Key, in an update's file, of the sum of the log-probabilities of each datum before the update."""

COST_METRICS = ("calls", "calls/other_roles", "tokens/prompt", "tokens/sampled", "seconds/sampling")
"""Calls, tokens and seconds of sampling; dollars are in the metrics that begin with COST."""

ROLLOUT_METRICS = ("rollouts/", "reward/", MEASURE, COST, "calls/", "recall/", "seconds/sampling")
"""Prefixes of the metrics of a step's rollouts, whichever policies they train."""


@dataclass(frozen=True)
class StepFiles:
    """Files of a step: the sealed batches, and what a policy made of them."""

    spans: Sequence[Path]
    trajectories: Path | None
    references: Mapping[str, Path]
    datums: Path
    held_out: Path | None = None
    """Measure of the step's checkpoint on held-out texts or pairs, if it was taken."""
    verdicts: Path | None = None
    """What a judge says of the step's rollouts, if there is one."""
    beside: Sequence[Path] = ()
    """Files of datums that are trained beside those of the rollouts."""

    def trained(self) -> list[Path]:
        """List the files of datums of the step."""
        return [self.datums, *self.beside]


def measure_step(
    files: StepFiles,
    trained_roles: Sequence[str] = TRAINED_ROLES,
    min_group_size: int = 1,
    loss: str = "importance_sampling",
) -> Metrics:
    """Measure what a policy made of a step that a loss trains, by the files that the step has.

    A metric without a value is left out.

    - `reward/…`: over the rollouts that have a reward.
    - `groups/…`: over the rollouts that called the policy, by role; a judge's scores are the
      rewards if there is a judge.
    - `entropy`: the mean of -log q over sampled tokens, q being the policy that sampled them.
    - `kl_reference_v1`, `_v2`: its divergence from the reference, as `measure_divergence`.
    - `teacher/kl`, `teacher/kl/<name>`: as v1, from the teachers, and from each of several.
    - `seconds/sampling`: from the first call's start to the last rollout's end.
    - `seconds/rollout`: the mean length of an attempt.
    """
    measures: dict[str, float | None] = {}
    sizes: Mapping[str, int] = {}
    if files.spans:
        of_rollouts, sizes = _rollouts(files.spans, trained_roles)
        measures |= of_rollouts
    datums = read_table(files.datums)
    if files.trajectories is not None:
        trajectories = read_table(files.trajectories)
        trained = [mask.any() for mask in arrays(trajectories["mask"])]
        judged = read_verdicts(files.verdicts)
        measures |= {
            **_groups(rewards_of(trajectories, verdicts=judged), sizes, min_group_size),
            **_count_not_kept(trajectories.filter(pa.array(trained, pa.bool_()))),
            "entropy": _mean(-_masked(trajectories["logprobs"], trajectories["mask"])),
            **_reference_divergence(trajectories, files.references),
            "datums/dropped": int(sum(trained)) - datums.num_rows,
        }
    if files.held_out is not None and is_written(files.held_out):
        found = read_json(files.held_out)
        held_out = {found["measure"]: found["value"], **found["beside"]}
        measures |= {f"test/{name}": value for name, value in held_out.items()}
    measures["datums"] = datums.num_rows
    measures["tokens/trained"] = sum(map(loss_of(loss).trained, columns_of(datums)))
    return {name: value for name, value in measures.items() if value is not None}


def _rollouts(
    spans: Sequence[Path], trained_roles: Sequence[str]
) -> tuple[dict[str, float | None], Mapping[str, int]]:
    """Measure a step's rollouts, whichever policies they train; return also each group's size."""
    files = [verified(path) for path in spans]
    (counts,) = select(QUERY, spans=files, trained=list(trained_roles)).to_pylist()
    apart = "rewards", "roles", "group_sizes", "sampling", "attempts", "rewarded_errors"
    rewards, roles, sizes, whole, attempts, errors = (counts.pop(name) for name in apart)
    measured = {
        **counts,
        **{f"{REWARDED}{name}": number for name, number in sorted(Counter(errors or []).items())},
        "reward/mean": fmean(rewards) if rewards else None,
        "reward/std": pstdev(rewards) if rewards else None,
        **_roles(roles or []),
        "seconds/sampling": whole,
        "seconds/rollout": fmean(attempts) if attempts else None,
    }
    return measured, {group["group_id"]: group["size"] for group in sizes or []}


def measure_divergence(batch: pa.Table, logprobs: Sequence[np.ndarray], step: int) -> Metrics:
    """Estimate the KL divergence of the training policy from the sampling one, over sampled tokens.

    A datum without a `policy_version`, which no policy sampled, has no part in it. `logprobs` is
    what forward-backward of `step` returned, one array a datum. With q sampling and p training,
    v1 = mean(log q - log p) and v2 = mean((log q - log p)²) / 2. On-policy both are near 0.001 (an
    engine in one precision: near 0); a batch whose tokens are shifted shows 0.3 or more. `ess` is
    Kish's effective sample size of the importance weights w = p / q, as a share of the n tokens:
    (Σw)² / (n Σw²), 1 on-policy.

    `lag` is the mean number of updates by which sampling was behind; if it is not 0, each of the
    others is also given for each lag alone, as `…/lag_2`.
    """
    sampled = arrays(batch["logprobs"])
    if len(sampled) != len(logprobs):
        raise ValueError(f"step {step} has {len(sampled)} datums, but {len(logprobs)} came back")
    for rollout, ours, theirs in zip(
        batch["rollout_id"].to_pylist(), sampled, logprobs, strict=True
    ):
        if len(ours) != len(theirs):
            raise ValueError(
                f"a datum of {rollout} has {len(ours)} targets, but {len(theirs)} "
                "log-probabilities came back: other tokens were predicted than were sampled"
            )
    versions = batch["policy_version"].to_pylist()
    rows = [
        (log_q, log_p, mask.astype(bool), np.full(len(mask), step - sampled_step(version)))
        for log_q, log_p, mask, version in zip(
            sampled, logprobs, arrays(batch["mask"]), versions, strict=True
        )
        if version is not None
    ]
    if not rows:
        return {}
    log_q, log_p, kept, lags = (np.concatenate(column) for column in zip(*rows, strict=True))
    log_q, log_p = log_q[kept].astype(np.float64), log_p[kept].astype(np.float64)
    lags = lags[kept]
    measured = {**_divergence(log_q - log_p), "lag": float(lags.mean())}
    for lag in np.unique(lags) if lags.any() else ():
        of_lag = _divergence((log_q - log_p)[lags == lag])
        measured |= {f"{name}/lag_{lag}": value for name, value in of_lag.items()}
    return measured


def measure_loss(
    datums: Sequence[Columns], logprobs: Sequence[np.ndarray], loss: str, settings: Settings
) -> Metrics:
    """Measure a loss over the datums of a step before their update, as the loss's row does."""
    return loss_of(loss).measure(complete_of(loss, settings), datums, logprobs)


def sum_logprobs(
    datums: Sequence[Columns], logprobs: Sequence[np.ndarray], loss: str
) -> dict[str, list[float]]:
    """Sum each datum's log-probabilities by the weights that the loss's row gives, if any."""
    weights = loss_of(loss).weights(datums)
    if weights is None:
        return {}
    sums = [float(one.astype(np.float64) @ own) for one, own in zip(weights, logprobs, strict=True)]
    return {DATUM_LOGPROBS: sums}


def _reference_divergence(
    trajectories: pa.Table, references: Mapping[str, Path]
) -> dict[str, float | None]:
    """Measure the divergence from the reference and the teachers over a step's sampled tokens."""
    log_q = _masked(trajectories["logprobs"], trajectories["mask"]).astype(np.float64)
    measured: dict[str, float | None] = {}
    for source, path in references.items() if len(log_q) else ():
        scored = read_table(path)
        apart = log_q - _masked(scored["logprobs"], trajectories["mask"])
        if source == "references":
            found = _divergence(apart)
            measured |= {f"kl_reference_{v}": found[f"kl_sample_train_{v}"] for v in ("v1", "v2")}
            continue
        measured["teacher/kl"] = _mean(apart)
        if TEACHER in scored.column_names:
            names = np.repeat(
                scored[TEACHER].to_pylist(), [mask.sum() for mask in arrays(trajectories["mask"])]
            )
            measured |= {f"teacher/kl/{n}": _mean(apart[names == n]) for n in np.unique(names)}
    return measured


def _divergence(log_ratios: np.ndarray) -> Metrics:
    """Measure log q - log p of sampled tokens."""
    weights = np.exp(-log_ratios)
    return {
        "kl_sample_train_v1": float(log_ratios.mean()),
        "kl_sample_train_v2": float((log_ratios**2).mean() / 2),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    }


def name_metrics(name: str, metrics: Metrics) -> Metrics:
    """Name the metrics of a policy: `policies/<name>/…`, or the plain names for the main policy."""
    if name == POLICY:
        return metrics
    own = {key: value for key, value in metrics.items() if not key.startswith(ROLLOUT_METRICS)}
    return {f"policies/{name}/{key}": value for key, value in own.items()}


def name_expert(metrics: Metrics) -> Metrics:
    """Name the metrics of an expert's texts, which are trained beside rollouts."""
    return {f"expert/{key.removeprefix('texts/')}": value for key, value in metrics.items()}


def drop_costs(metrics: Metrics) -> Metrics:
    """Set the costs of the rollouts to 0: another run has paid for them."""
    return {
        name: 0 if name in COST_METRICS or name.startswith(COST) else value
        for name, value in metrics.items()
    }


def _roles(roles: Sequence[Mapping[str, Any]]) -> Metrics:
    """Return each role's mean reward, if roles are rewarded, and its cost, if it has a price.

    The agent's own measures have their own names.
    """
    means = {of["role"]: fmean(of["rewards"]) for of in roles if of["rewards"]}
    earned = {
        role if role.startswith(MEASURE) else f"reward/{role}/mean": mean
        for role, mean in means.items()
    }
    return earned | {f"{COST}{of['role']}": fsum(of["costs"]) for of in roles if of["costs"]}


def _groups(rewards: pa.Table, played: Mapping[str, int], min_group_size: int) -> Metrics:
    """Count the groups of each role; `played` has each group's rollouts, the failed ones too."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rewards.to_pylist():
        groups[row["role"], row["group_id"]].append(row["reward"])
    roles = {role for role, _ in groups} or {""}
    left = [(len(groups.get((role, g), ())), size) for role in roles for g, size in played.items()]
    counts: Metrics = {
        "groups": len(groups),
        "groups/partial": sum(count < size for count, size in left),
        "groups/dropped": sum(count < min_group_size for count, _ in left),
    }
    if groups:
        counts["groups/uniform_fraction"] = fmean(map(is_uniform, groups.values()))
    return counts


def _count_not_kept(trajectories: pa.Table) -> Metrics:
    """Count the trajectories that should have continued another one, by reason."""
    reasons = Counter(trajectories["begins"].to_pylist())
    del reasons["new"]
    not_kept = {f"turns/not_kept/{reason}": count for reason, count in sorted(reasons.items())}
    return {"trajectories": trajectories.num_rows, "turns/not_kept": reasons.total(), **not_kept}


def _masked(values: pa.ChunkedArray, masks: pa.ChunkedArray) -> np.ndarray:
    return flat_values(values)[flat_values(masks).astype(bool)]


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None
