"""A step → its metrics: one flat row of numbers, under the field's names."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from operator import itemgetter
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
from ratchet.tasks.recording.spans import BEGUN, CREDIT, ERROR, LLM, REWARD, TIMES
from ratchet.tasks.recording.step_log import COST, REWARDED, Metrics
from ratchet.tasks.rewards import read_verdicts, rewards_of
from ratchet.tasks.scoring import TEACHER
from ratchet.tasks.storage.files import is_written, read_json
from ratchet.tasks.storage.tables import arrays, flat_values, read_parts, read_table
from ratchet.tasks.trajectories import TRAINED_ROLES

TOKEN_COLUMNS = ("prompt_token_ids", "response_token_ids")
SPAN_COLUMNS = (
    "rollout_id", "group_id", "attempt", "role", "call", "kind", "error_type", "recalled",
    "request_sha", "gen_ai_request_seed", "kept_tokens", "reward", "attributes",
    *TIMES, *TOKEN_COLUMNS,
)  # fmt: skip
"""Columns of spans that are measured."""

Row = Mapping[str, Any]

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
    """Measure a step's rollouts, whichever policies they train; return also each group's size.

    Calls and tokens are those of the trained roles in every attempt, also where the rollout failed:
    they were sampled, and paid for. What an attempt was given again was paid for before it.
    """
    rows = [row for part in read_parts(spans, SPAN_COLUMNS) for row in _light_rows(part)]
    rollouts = _group(rows, "rollout_id")
    ends = {name: [row for row in own if row["kind"] == REWARD] for name, own in rollouts.items()}
    rewarded = [max(own, key=itemgetter("attempt")) for own in ends.values() if own]
    rewards = [row["reward"] for row in rewarded if row["reward"] is not None]
    called = {row["rollout_id"] for row in rows if row["kind"] == LLM}
    errors = [own[0]["error_type"] for own in ends.values() if own and own[0]["error_type"]]
    refused = (row["attributes"].get("calls_refused", 0) for row in rows)
    whole, attempts = _seconds(rows)
    measured = {
        "rollouts/ok": len(rewarded),
        "rollouts/failed": len(rollouts) - len(rewarded),
        "rollouts/retried": sum(any(row["attempt"] for row in own) for own in rollouts.values()),
        "rollouts/without_calls": sum(row["rollout_id"] not in called for row in rewarded),
        "calls/refused": sum(refused),
        **_calls([row for row in rows if row["kind"] == LLM], trained_roles),
        "calls/lost": sum(row["kind"] == BEGUN for row in rows),
        **{f"{REWARDED}{name}": number for name, number in sorted(Counter(errors).items())},
        "reward/mean": fmean(rewards) if rewards else None,
        "reward/std": pstdev(rewards) if rewards else None,
        **_roles(rows),
        "seconds/sampling": whole,
        "seconds/rollout": fmean(attempts) if attempts else None,
    }
    return measured, Counter(own[0]["group_id"] for own in rollouts.values())


def _light_rows(spans: pa.Table) -> Iterator[Row]:
    """Yield spans with the lengths of their lists of tokens, and with their JSON read."""
    columns = {name: spans[name] for name in SPAN_COLUMNS}
    lists = {name: spans[name].combine_chunks() for name in TOKEN_COLUMNS}
    columns |= {name: column.value_lengths().fill_null(0) for name, column in lists.items()}
    columns |= {name: spans[name].cast(pa.int64()) for name in TIMES}
    read = (column.to_pylist() for column in columns.values())
    for values in zip(*read, strict=True):
        row = dict(zip(columns, values, strict=True))
        yield {**row, "attributes": json.loads(row["attributes"] or "{}")}


def _group(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Group rows by the values of a column, or of several."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[itemgetter(*names)(row)].append(row)
    return groups


def _calls(calls: Sequence[Row], trained_roles: Sequence[str]) -> dict[str, float | None]:
    """Count calls and tokens; say how many calls were recalled, or were asked otherwise again."""
    recalled = [call for call in calls if call["recalled"]]
    answered = [c for c in calls if not c["recalled"] and c["error_type"] is None]
    trained = [call for call in answered if call["role"] in trained_roles]
    prompts, sampled = (sum(call[name] for call in trained) for name in TOKEN_COLUMNS)
    kept = [call["kept_tokens"] for call in trained if call["kept_tokens"] is not None]
    asked = _group(calls, "rollout_id", "role", "call", "gen_ai_request_seed")
    diverged = {
        own[0]["rollout_id"]
        for own in asked.values()
        if len({call["request_sha"] for call in own} - {None}) > 1
    }
    return {
        "calls": len(trained),
        "tokens/prompt": prompts,
        "tokens/sampled": sampled,
        # The share of the prompts' tokens that are an earlier call's, kept as they were sampled.
        "tokens/kept_fraction": sum(kept) / prompts if kept and prompts else None,
        "format/valid_fraction": _share(trained, "format", "valid"),
        "tool_choice/kept_fraction": _share(trained, "tool_choice", "kept"),
        "calls/other_roles": len(answered) - len(trained),
        "recall/calls": len(recalled),
        "recall/tokens": sum(call["response_token_ids"] for call in recalled),
        "recall/rollouts": len({call["rollout_id"] for call in recalled}),
        "recall/diverged": len(diverged),
    }


def _share(calls: Sequence[Row], asked: str, met: str) -> float | None:
    """Return the share of the answers that met what was asked; None if it was asked of none."""
    found = [call["attributes"].get(asked, {}).get(met) for call in calls]
    known = [one for one in found if one is not None]
    return fmean(map(bool, known)) if known else None


def _seconds(rows: Sequence[Row]) -> tuple[float | None, list[float]]:
    """Return the seconds from the first start to the last end, and those of each attempt."""
    started, ended = ([row[name] for row in rows if row[name] is not None] for name in TIMES)
    whole = (max(ended) - min(started)) / 1e6 if started and ended else None
    return whole, [
        (row["ended"] - row["started"]) / 1e6 for row in rows if row["kind"] in (REWARD, ERROR)
    ]


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


def _roles(rows: Sequence[Row]) -> Metrics:
    """Return each role's mean reward, if roles are rewarded, and its cost, if it has a price.

    Credits count in an attempt that was rewarded. The agent's own measures have their own names.
    """
    rewarded = {(row["rollout_id"], row["attempt"]) for row in rows if row["kind"] == REWARD}
    earned: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        counts = row["kind"] == CREDIT and row["call"] is None
        if counts and (row["rollout_id"], row["attempt"]) in rewarded:
            earned[row["role"]].append(row["reward"])
        cost = row["attributes"].get("cost")
        if row["kind"] == LLM and not row["recalled"] and cost is not None:
            costs[row["role"]].append(cost)
    names = {role: role if role.startswith(MEASURE) else f"reward/{role}/mean" for role in earned}
    means = {names[role]: fmean(earned[role]) for role in sorted(earned)}
    return means | {f"{COST}{role}": fsum(costs[role]) for role in sorted(costs)}


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
