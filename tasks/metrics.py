"""A step → one flat row of numbers, by the field's names."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pyarrow as pa

from adapters.calls import POLICY
from tasks.advantages import is_uniform
from tasks.storage.checksums import verified
from tasks.storage.files import append_line, read_lines
from tasks.storage.tables import arrays, read, select
from tasks.trajectories import TRAINED_ROLES, rewards_by_role

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")

Metrics = dict[str, float]

COST = "cost/"
"""Before the name of a role: what its calls cost, in US dollars."""

OF_ROLLOUTS = ("rollouts/", "reward/", COST, "calls/", "replay/", "seconds/sampling")
"""What is measured of a step's rollouts, whichever policies were sampled in them."""


def measure(
    spans: Path,
    trajectories: Path,
    datums: Path,
    smallest_group: int = 1,
    trained_roles: Sequence[str] = TRAINED_ROLES,
) -> Metrics:
    """What is known of a step before its update. A number there is no value for is left out.

    `reward/…` is over the rollouts that have a reward; `groups/…` over those of them in which the
    policy was called, for each role that it has; `entropy` is the mean of -log q over their sampled
    tokens, q being the policy that sampled them.
    """
    counts = select(QUERY, spans=verified(spans), trained=list(trained_roles)).to_pylist()[0]
    rewards, roles = counts.pop("rewards") or [], counts.pop("roles") or []
    sizes = {group["group_id"]: group["size"] for group in counts.pop("group_sizes") or []}
    made, batch = read(trajectories), read(datums)
    trained = [mask.any() for mask in arrays(made["mask"])]
    measures = {
        **counts,
        "reward/mean": fmean(rewards) if rewards else None,
        "reward/std": pstdev(rewards) if rewards else None,
        **_roles(roles),
        **_groups(rewards_by_role(made), sizes, smallest_group),
        **_prefixes(made.filter(pa.array(trained, pa.bool_()))),
        "entropy": _mean(-_masked(made["logprobs"], made["mask"])),
        "datums": batch.num_rows,
        "datums/dropped": int(sum(trained)) - batch.num_rows,
        "tokens/trained": sum(int(mask.sum()) for mask in arrays(batch["mask"])),
    }
    return {name: value for name, value in measures.items() if value is not None}


def divergence(datums: Path, logprobs: Sequence[np.ndarray]) -> Metrics:
    """How far the policy that samples is from the one that trains, over the sampled tokens.

    `logprobs` is what forward-backward returned, a datum each. With q sampling and p training,
    v1 = mean(log q - log p) and v2 = mean((log q - log p)²) / 2. On-policy both are near 0.001
    (an engine in one precision: near 0); a batch whose tokens are shifted shows 0.3 and more.
    """
    batch = read(datums, columns=["rollout_id", "logprobs", "mask"])
    sampled = arrays(batch["logprobs"])
    if len(sampled) != len(logprobs):
        raise ValueError(f"{datums} has {len(sampled)} datums, but {len(logprobs)} came back")
    for rollout, ours, theirs in zip(
        batch["rollout_id"].to_pylist(), sampled, logprobs, strict=True
    ):
        if len(ours) != len(theirs):
            raise ValueError(
                f"a datum of {rollout} has {len(ours)} targets, but {len(theirs)} "
                "log-probabilities came back: other tokens were predicted than were sampled"
            )
    if not sampled:
        return {}
    kept = np.concatenate(arrays(batch["mask"])).astype(bool)
    log_q = np.concatenate(sampled)[kept].astype(np.float64)
    log_p = np.concatenate(logprobs)[kept].astype(np.float64)
    apart = log_q - log_p
    return {
        "kl_sample_train_v1": float(apart.mean()),
        "kl_sample_train_v2": float((apart**2).mean() / 2),
    }


def of_policy(name: str, metrics: Metrics) -> Metrics:
    """What is a policy's own, under its name. The main policy has the plain names, and all."""
    if name == POLICY:
        return metrics
    own = {key: value for key, value in metrics.items() if not key.startswith(OF_ROLLOUTS)}
    return {f"policies/{name}/{key}": value for key, value in own.items()}


def record_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> bool:
    """Add a step's line to metrics.jsonl; a step that has one keeps it, and False is returned."""
    if any(row["step"] == step for row in read_metrics(path)):
        return False
    append_line(path, json.dumps({"step": step, **metrics}, allow_nan=False))
    return True


def read_metrics(path: Path) -> list[Metrics]:
    """The lines of metrics.jsonl, in order; none if there is no such file."""
    return [json.loads(line) for line in read_lines(path)]


def _roles(roles: Sequence[Mapping[str, Any]]) -> Metrics:
    """What each role earned, if its agent rewards roles, and cost, if its calls have a price."""
    earned = {f"reward/{of['role']}/mean": fmean(of["rewards"]) for of in roles if of["rewards"]}
    return earned | {f"{COST}{of['role']}": fsum(of["costs"]) for of in roles if of["costs"]}


def _groups(
    roles: Mapping[str, Mapping[str, Mapping[str, float]]],
    played: Mapping[str, int],
    smallest: int,
) -> Metrics:
    """`played` is the rollouts of each group, also of those that failed or called nothing."""
    groups = [group for by_name in roles.values() for group in by_name.values()]
    left = [
        (len(by_name.get(name, {})), size)
        for by_name in roles.values() or [{}]
        for name, size in played.items()
    ]
    counts: Metrics = {
        "groups": len(groups),
        "groups/partial": sum(count < size for count, size in left),
        "groups/dropped": sum(count < smallest for count, _ in left),
    }
    if not groups:
        return counts
    uniform = fmean(is_uniform(list(group.values())) for group in groups)
    return {**counts, "groups/uniform_fraction": uniform}


def _prefixes(trajectories: pa.Table) -> Metrics:
    """Trajectories that should have continued another one, by the reason why they do not."""
    reasons = Counter(trajectories["begins"].to_pylist())
    del reasons["new"]
    broken = {f"prefix/broken/{reason}": count for reason, count in sorted(reasons.items())}
    return {"trajectories": trajectories.num_rows, "prefix/broken": reasons.total(), **broken}


def _masked(values: pa.ChunkedArray, masks: pa.ChunkedArray) -> np.ndarray:
    parts = [v[m.astype(bool)] for v, m in zip(arrays(values), arrays(masks), strict=True)]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None
