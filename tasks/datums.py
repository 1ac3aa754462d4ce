"""trajectories × advantages → datums: a Parquet file that is the training batch of a step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import tinker

from tasks.advantages import CreditAssignment, Normalise, advantages_by_call
from tasks.losses import find_loss
from tasks.returns import Calls, Returns, calls_of, returns_by_role
from tasks.storage.durability import durable
from tasks.storage.tables import arrays, read, write
from tasks.trajectories import LISTS, assemble

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("role", pa.string()),
        ("first_call", pa.int32()),
        ("policy_version", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        # Position i of each list below is about predicting targets[i] from tokens[: i + 1].
        ("tokens", pa.list_(pa.int32())),
        ("targets", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.int8())),
    ]
)

DTYPES = {"target_tokens": np.int64}


def build(trajectories: pa.Table, credit: CreditAssignment) -> pa.Table:
    """Build the training batch: one row in SCHEMA per trajectory with a non-zero advantage.

    A trajectory whose advantages are zero, or in which nothing is trained, moves no weight and is
    left out; `trajectories.num_rows - build(…).num_rows` counts them. The trajectories of a group
    with fewer than `credit.min_group_size` rollouts to train on are left out too.

    A role is compared with the same role of the group's other rollouts (`tasks.returns`), and if
    its calls have rewards, each call with theirs; `advantage` is then the mean over the
    trajectory's calls.

    Tinker sums its losses over tokens and datums, so `credit.normalise` scales the advantages
    instead: `none` by 1; `tokens` by 1 / (the step's trained tokens), a mean over tokens;
    `rollouts` by 1 / (the rollout's trained tokens × the step's rollouts), a mean over rollouts of
    means over tokens. The divisors count rollouts of zero advantage too.
    """
    returns = returns_by_role(trajectories, credit.discount)
    advantages = _advantages(returns, credit.advantage, credit.min_group_size)
    compared = [name in advantages for name in _names(trajectories)]
    trajectories = trajectories.filter(pa.array(compared, pa.bool_()))
    tokens, logprobs, masks = (arrays(trajectories[name]) for name in LISTS)
    calls = calls_of(trajectories)
    scales = _scales(trajectories["rollout_id"].to_pylist(), masks, credit.normalise)
    rows = []
    for place, row in enumerate(trajectories.drop_columns(list(LISTS)).to_pylist()):
        rollout, mask = row["rollout_id"], masks[place]
        name = row["role"], rollout
        by_call = _select_calls(row, advantages[name], calls.get(name, {}))
        if not mask.any() or not any(by_call):
            continue
        if mask[0]:
            raise ValueError(f"rollout {rollout} sampled its first token from an empty prompt")
        by_token = np.repeat(by_call, len(mask) if len(by_call) == 1 else row["call_tokens"])
        # All but the inputs move one place to the left: the last sampled token is a target.
        row["advantage"] = fmean(by_call)
        row["tokens"] = tokens[place][:-1]
        row["targets"] = tokens[place][1:]
        row["logprobs"] = logprobs[place][1:]
        row["advantages"] = np.where(mask[1:], by_token[1:] * scales[rollout], 0.0)
        row["mask"] = mask[1:]
        rows.append({name: row[name] for name in SCHEMA.names})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_datums(path: Path, trajectories: Path, credit: CreditAssignment) -> None:
    """Write the training batch of a file of trajectories; the batch may have no rows."""
    write(build(read(trajectories), credit), path)


build_datums = durable("build_datums", write_datums)
"""trajectories × advantages → datums, of one policy."""


def read_datums(path: Path, loss: str) -> list[tinker.Datum]:
    """Read a training batch as Tinker's datums (`to_datums`)."""
    return to_datums(read(path), loss)


def datums_of_batch(
    spans: Path, roles: Sequence[str], credit: CreditAssignment, loss: str
) -> list[tinker.Datum]:
    """Build the datums of one rollout batch, which are those that the whole step has for it.

    That holds as long as credit is assigned within groups: without `normalise`.
    """
    return to_datums(build(assemble([spans], roles), credit), loss)


def to_datums(batch: pa.Table, loss: str) -> list[tinker.Datum]:
    """Convert rows in SCHEMA to Tinker's datums, with exactly the inputs that the loss takes."""
    inputs = find_loss(loss).inputs
    columns = {"tokens", *inputs.values()}
    lists = {name: arrays(batch[name]) for name in columns}
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(lists["tokens"][row].tolist()),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(
                    lists[column][row].astype(DTYPES.get(name, np.float32))
                )
                for name, column in inputs.items()
            },
        )
        for row in range(batch.num_rows)
    ]


def _names(trajectories: pa.Table) -> list[tuple[str, str]]:
    """Return role and rollout of each trajectory."""
    columns = (trajectories[name].to_pylist() for name in ("role", "rollout_id"))
    return list(zip(*columns, strict=True))


def _advantages(
    roles: Mapping[str, Mapping[str, Returns]], estimator: str, smallest_group: int
) -> dict[tuple[str, str], list[float]]:
    """Map role and rollout to the advantages of its calls, or one for all; omit small groups."""
    return {
        (role, rollout): by_call
        for role, groups in roles.items()
        for group in groups.values()
        if len(group) >= smallest_group
        for rollout, by_call in advantages_by_call(group, estimator).items()
    }


def _select_calls(
    trajectory: Mapping[str, Any], advantages: list[float], calls: Calls
) -> list[float]:
    """Select the advantages of the trajectory's calls from those of its role."""
    if len(advantages) == 1:
        return advantages
    by_number = dict(zip(calls, advantages, strict=True))
    return [by_number[number] for number in trajectory["call_numbers"]]


def _scales(
    rollouts: Sequence[str], masks: Sequence[np.ndarray], normalise: Normalise
) -> dict[str, float]:
    """Map each rollout to the factor of its advantages."""
    tokens: dict[str, int] = defaultdict(int)
    for rollout, mask in zip(rollouts, masks, strict=True):
        tokens[rollout] += int(mask.sum())
    trained = {rollout: count for rollout, count in tokens.items() if count}
    match normalise:
        case "none":
            return dict.fromkeys(trained, 1.0)
        case "tokens":
            return dict.fromkeys(trained, 1.0 / sum(trained.values()))
        case "rollouts":
            return {rollout: 1.0 / (count * len(trained)) for rollout, count in trained.items()}
    raise ValueError(f"no normalise '{normalise}' (there is: none, tokens, rollouts)")
