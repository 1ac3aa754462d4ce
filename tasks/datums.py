"""trajectories × advantages → datums: a Parquet file that is the training batch of a step."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import tinker

from tasks.algorithm.advantages import CreditAssignment, estimate_advantages, find_advantage
from tasks.algorithm.losses import find_loss
from tasks.algorithm.settings import Settings, complete_settings
from tasks.algorithm.update_method import UpdateMethod
from tasks.returns import Calls, calls_of, earnings_by_role
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
        # Factor of the datum's loss.
        ("scale", pa.float64()),
    ]
)

DTYPES = {"target_tokens": np.int64}


def build(trajectories: pa.Table, credit: CreditAssignment) -> pa.Table:
    """Build the training batch: one row in SCHEMA per trajectory with a non-zero advantage.

    A trajectory whose advantages are zero, unless the loss is regularized, or in which nothing is
    trained, moves no weight and is left out, and so are the trajectories of a group with fewer than
    `credit.min_group_size` rollouts to train on; `trajectories.num_rows - build(…).num_rows` counts
    them.

    A role is compared with the same role of the group's other rollouts (`tasks.returns`), and if
    its calls have rewards, each call with theirs; `advantage` is then the mean over the
    trajectory's calls.

    Tinker sums its losses over tokens and datums, so `credit.aggregation` divides each datum's
    loss, by its `scale`: a `sum` by 1; a `token_mean` by the step's trained tokens; a
    `rollout_mean`, of means over tokens, by the rollout's trained tokens × the step's rollouts; a
    `rollout_sum`, the mean of sums over tokens, by the step's rollouts; `fixed` by the divisor.
    The divisors count rollouts of zero advantage too.
    """
    advantages = _advantages(trajectories, credit)
    compared = [name in advantages for name in _names(trajectories)]
    trajectories = trajectories.filter(pa.array(compared, pa.bool_()))
    tokens, logprobs, masks = (arrays(trajectories[name]) for name in LISTS)
    calls = calls_of(trajectories)
    scales = _scales(trajectories["rollout_id"].to_pylist(), masks, credit)
    rows = []
    for place, row in enumerate(trajectories.drop_columns(list(LISTS)).to_pylist()):
        rollout, mask = row["rollout_id"], masks[place]
        name = row["role"], rollout
        by_call = _select_calls(row, advantages[name], calls.get(name, {}))
        if not mask.any() or not (any(by_call) or credit.regularized):
            continue
        if mask[0]:
            raise ValueError(f"rollout {rollout} sampled its first token from an empty prompt")
        by_token = np.repeat(by_call, len(mask) if len(by_call) == 1 else row["call_tokens"])
        # All but the inputs move one place to the left: the last sampled token is a target.
        row["advantage"] = fmean(by_call)
        row["tokens"] = tokens[place][:-1]
        row["targets"] = tokens[place][1:]
        row["logprobs"] = logprobs[place][1:]
        row["advantages"] = np.where(mask[1:], by_token[1:], 0.0)
        row["scale"] = scales[rollout]
        row["mask"] = mask[1:]
        rows.append({name: row[name] for name in SCHEMA.names})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_datums(path: Path, trajectories: Path, credit: CreditAssignment) -> None:
    """Write the training batch of a file of trajectories; the batch may have no rows."""
    write(build(read(trajectories), credit), path)


build_datums = durable("build_datums", write_datums)
"""trajectories × advantages → datums, of one policy."""


def read_datums(path: Path, loss: str, settings: Settings | None = None) -> list[tinker.Datum]:
    """Read a training batch as Tinker's datums (`to_datums`)."""
    return to_datums(read(path), loss, settings)


def datums_of_batch(
    spans: Path, roles: Sequence[str], credit: CreditAssignment, method: UpdateMethod
) -> list[tinker.Datum]:
    """Build the datums of one rollout batch, which are those that the whole step has for it.

    That holds as long as credit is assigned within groups, and losses are summed.
    """
    batch = build(assemble([spans], roles), credit)
    return to_datums(batch, method.loss, method.loss_settings)


def to_datums(batch: pa.Table, loss: str, settings: Settings | None = None) -> list[tinker.Datum]:
    """Convert rows in SCHEMA to Tinker's datums, with exactly the inputs that the loss takes."""
    row = find_loss(loss)
    complete = complete_settings(f"the loss {loss}", settings or {}, row.settings)
    tokens = arrays(batch["tokens"])
    columns = {name: arrays(batch[name]) for name in ("targets", "logprobs", "advantages", "mask")}
    columns["scale"] = [*batch["scale"].to_numpy()]
    datums = []
    for place in range(batch.num_rows):
        of_datum = {name: values[place] for name, values in columns.items()}
        inputs = {
            name: tinker.TensorData.from_numpy(
                make(of_datum, complete).astype(DTYPES.get(name, np.float32))
            )
            for name, make in row.inputs.items()
        }
        model_input = tinker.ModelInput.from_ints(tokens[place].tolist())
        datums.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return datums


def _names(trajectories: pa.Table) -> list[tuple[str, str]]:
    """Return role and rollout of each trajectory."""
    columns = (trajectories[name].to_pylist() for name in ("role", "rollout_id"))
    return list(zip(*columns, strict=True))


def _advantages(
    trajectories: pa.Table, credit: CreditAssignment
) -> dict[tuple[str, str], list[float]]:
    """Map role and rollout to the advantages of its calls, or one for all; omit small groups."""
    by_call = find_advantage(credit.advantage).by_call
    roles = earnings_by_role(trajectories, credit.discount, by_call=by_call)
    advantages: dict[tuple[str, str], list[float]] = {}
    for role, groups in roles.items():
        large = {name: of for name, of in groups.items() if len(of) >= credit.min_group_size}
        of_role = estimate_advantages(large, credit.advantage, credit.advantage_settings)
        advantages |= {(role, rollout): values for rollout, values in of_role.items()}
    return advantages


def _select_calls(
    trajectory: Mapping[str, Any], advantages: list[float], calls: Calls
) -> list[float]:
    """Select the advantages of the trajectory's calls from those of its role."""
    if len(advantages) == 1:
        return advantages
    by_number = dict(zip(calls, advantages, strict=True))
    return [by_number[number] for number in trajectory["call_numbers"]]


def _scales(
    rollouts: Sequence[str], masks: Sequence[np.ndarray], credit: CreditAssignment
) -> dict[str, float]:
    """Map each rollout to the factor of its loss."""
    tokens: dict[str, int] = defaultdict(int)
    for rollout, mask in zip(rollouts, masks, strict=True):
        tokens[rollout] += int(mask.sum())
    trained = {rollout: count for rollout, count in tokens.items() if count}
    divisors: dict[str, Callable[[int], float]] = {
        "sum": lambda _: 1.0,
        "token_mean": lambda _: sum(trained.values()),
        "rollout_mean": lambda count: count * len(trained),
        "rollout_sum": lambda _: len(trained),
        "fixed": lambda _: credit.divisor or 1.0,
    }
    divisor = divisors[credit.aggregation]
    return {rollout: 1.0 / divisor(count) for rollout, count in trained.items()}
