"""trajectory × advantage → tinker.Datum, by way of a Parquet file that is the training batch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import tinker

from tasks.advantages import advantages_by_call
from tasks.returns import Calls, Returns, calls_of, returns_by_role
from tasks.storage.tables import arrays, read, write
from tasks.trajectories import LISTS

Normalise = Literal["none", "tokens", "rollouts"]

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

# What each loss of Tinker reads, by Tinker's name → the column it comes from.
# Cross-entropy weighted by advantages is REINFORCE without a ratio: -sum A log p.
POLICY_GRADIENT = {"target_tokens": "targets", "logprobs": "logprobs", "advantages": "advantages"}
LOSS_INPUTS = {
    "cross_entropy": {"target_tokens": "targets", "weights": "advantages"},
    "importance_sampling": POLICY_GRADIENT,
    "ppo": POLICY_GRADIENT,
    "cispo": POLICY_GRADIENT,
    "dro": POLICY_GRADIENT,
    "gspo": {**POLICY_GRADIENT, "sequence_ratio_mask": "mask"},
}
DTYPES = {"target_tokens": np.int64}


def check_loss(loss: str, normalise: Normalise = "none") -> None:
    """Refuse a loss that has no datums here, and a scale that the loss would not honour."""
    if loss not in LOSS_INPUTS:
        raise ValueError(f"no datums for the loss '{loss}' (there is: {', '.join(LOSS_INPUTS)})")
    if loss == "dro" and normalise != "none":
        raise ValueError(
            f"normalise '{normalise}' scales advantages, but the quadratic term of dro has none: "
            "use normalise 'none' with it"
        )


def build(
    trajectories: pa.Table,
    estimator: str,
    normalise: Normalise = "none",
    smallest_group: int = 1,
    discount: float = 1.0,
) -> pa.Table:
    """The training batch: one row per trajectory that teaches something, in SCHEMA.

    A trajectory whose advantages are zero, or of which nothing is trained, moves no weight: it is
    left out, and `trajectories.num_rows - build(…).num_rows` counts it. So are the trajectories of
    a group with fewer than `smallest_group` rollouts to train on, as if it was never played.

    A role is compared with the same role of the group's other rollouts (`tasks.returns`), and where
    its calls have rewards, each call with theirs; `advantage` is then the mean of the trajectory's.

    Tinker sums its losses over tokens and datums, so `normalise` scales the advantages instead:
    by nothing; by 1 / (the step's trained tokens), a mean over tokens; or by 1 / (the rollout's
    trained tokens × the step's rollouts), a mean over rollouts of means over tokens. The divisors
    count rollouts of zero advantage too, so that they do not depend on luck.
    """
    advantages = _advantages(returns_by_role(trajectories, discount), estimator, smallest_group)
    compared = [name in advantages for name in _names(trajectories)]
    trajectories = trajectories.filter(pa.array(compared, pa.bool_()))
    tokens, logprobs, masks = (arrays(trajectories[name]) for name in LISTS)
    calls = calls_of(trajectories)
    scales = _scales(trajectories["rollout_id"].to_pylist(), masks, normalise)
    rows = []
    for place, row in enumerate(trajectories.drop_columns(list(LISTS)).to_pylist()):
        rollout, mask = row["rollout_id"], masks[place]
        name = row["role"], rollout
        by_call = _of_its_calls(row, advantages[name], calls.get(name, {}))
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


def write_datums(
    trajectories: Path,
    path: Path,
    estimator: str,
    normalise: Normalise = "none",
    smallest_group: int = 1,
    discount: float = 1.0,
) -> Path:
    """`path`, holding the training batch made of the file `trajectories`; it may have no rows."""
    return write(build(read(trajectories), estimator, normalise, smallest_group, discount), path)


def read_datums(path: Path, loss: str) -> list[tinker.Datum]:
    """The batch in `path` as `loss` wants it: exactly its inputs, as Tinker refuses others."""
    check_loss(loss)
    table = read(path)
    columns = {"tokens", *LOSS_INPUTS[loss].values()}
    lists = {name: arrays(table[name]) for name in columns}
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(lists["tokens"][row].tolist()),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(
                    lists[column][row].astype(DTYPES.get(name, np.float32))
                )
                for name, column in LOSS_INPUTS[loss].items()
            },
        )
        for row in range(table.num_rows)
    ]


def _names(trajectories: pa.Table) -> list[tuple[str, str]]:
    """Role and rollout of each trajectory."""
    columns = (trajectories[name].to_pylist() for name in ("role", "rollout_id"))
    return list(zip(*columns, strict=True))


def _advantages(
    roles: Mapping[str, Mapping[str, Returns]], estimator: str, smallest_group: int
) -> dict[tuple[str, str], list[float]]:
    """Role and rollout → the advantages of its calls, or one for all; smaller groups left out."""
    return {
        (role, rollout): by_call
        for role, groups in roles.items()
        for group in groups.values()
        if len(group) >= smallest_group
        for rollout, by_call in advantages_by_call(group, estimator).items()
    }


def _of_its_calls(
    trajectory: Mapping[str, Any], advantages: list[float], calls: Calls
) -> list[float]:
    """Of a role's advantages those of the trajectory's calls."""
    if len(advantages) == 1:
        return advantages
    by_number = dict(zip(calls, advantages, strict=True))
    return [by_number[number] for number in trajectory["call_numbers"]]


def _scales(
    rollouts: Sequence[str], masks: Sequence[np.ndarray], normalise: Normalise
) -> dict[str, float]:
    """Rollout → the factor of its advantage."""
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
