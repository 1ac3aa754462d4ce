"""trajectories × advantages → datums: a Parquet file that is the training batch of a step."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow as pa
import tinker

from tasks.algorithm.advantages import CreditAssignment, estimate_advantages, find_advantage
from tasks.algorithm.comparisons import Baselines
from tasks.algorithm.divergences import Penalty
from tasks.algorithm.losses import find_loss
from tasks.algorithm.settings import Settings, complete_settings
from tasks.algorithm.update_method import UpdateMethod
from tasks.references import reference_logprobs
from tasks.returns import Calls, calls_of, earnings_by_role
from tasks.rewards import (
    MeanRewards,
    Rewards,
    greedy_rewards,
    mean_rewards,
    read_rewards,
    rewards_by_role,
)
from tasks.storage.durability import durable
from tasks.storage.tables import arrays, read, write
from tasks.trajectories import LISTS, trajectories_of

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


def datums_of(
    trajectories: pa.Table,
    rewards: Rewards,
    credit: CreditAssignment,
    references: pa.Table | None = None,
    history: Sequence[MeanRewards] = (),
) -> pa.Table:
    """Build the training batch: one row in SCHEMA per trajectory with a non-zero advantage.

    A trajectory whose advantages are zero, unless the loss is regularized, or in which nothing is
    trained, moves no weight and is left out, and so are the trajectories of a group with fewer than
    `credit.min_group_size` rollouts to train on.

    A role is compared with the same role of the group's other rollouts (`tasks.returns`), and if
    its calls have rewards, each call with theirs; `advantage` is the mean over the trajectory's
    sampled tokens. `history` is of all earlier steps, for an advantage that reads it. The KL
    penalty (`credit.penalty`, which reads the `references`) and the entropy bonus
    (`credit.entropy_coefficient`) change `advantages`, not `advantage`.

    Tinker sums its losses over tokens and datums, so `credit.aggregation` divides each datum's
    loss, by its `scale`: a `sum` by 1; a `token_mean` by the step's trained tokens; a
    `rollout_mean`, of means over tokens, by the rollout's trained tokens × the step's rollouts; a
    `rollout_sum`, the mean of sums over tokens, by the step's rollouts; `fixed` by the divisor.
    The divisors count rollouts of zero advantage too.

    With `credit.trained_calls`, at most so many calls are trained; the masks of others are 0.
    """
    assigned = _assign(trajectories, rewards, credit, references, history)
    scales, made = _scales(assigned, credit), assigned.trajectories
    tokens, logprobs = arrays(made["tokens"]), arrays(made["logprobs"])
    rows = []
    for place, row in enumerate(made.drop_columns(list(LISTS)).to_pylist()):
        mask, advantages = assigned.masks[place], assigned.advantages[place]
        if not mask.any() or not (advantages.any() or credit.regularized):
            continue
        if mask[0]:
            raise ValueError(
                f"rollout {row['rollout_id']} sampled its first token from an empty prompt"
            )
        # All but the inputs move one place to the left: the last sampled token is a target.
        row["advantage"] = fmean(assigned.compared[place][mask != 0])
        row["tokens"] = tokens[place][:-1]
        row["targets"] = tokens[place][1:]
        row["logprobs"] = logprobs[place][1:]
        row["advantages"] = advantages[1:]
        row["scale"] = scales[row["rollout_id"]]
        row["mask"] = mask[1:]
        rows.append({name: row[name] for name in SCHEMA.names})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_datums(
    path: Path,
    trajectories: Path,
    rewards: Path,
    credit: CreditAssignment,
    references: Path | None = None,
    history: Sequence[Path] = (),
) -> None:
    """Write the datums of a step; there may be none. `history` has the rewards of earlier steps."""
    scored = None if references is None else read(references)
    means = [mean_rewards(read_rewards(earlier)) for earlier in history]
    write(datums_of(read(trajectories), read_rewards(rewards), credit, scored, means), path)


build_datums = durable("build_datums", write_datums)
"""trajectories × rewards → datums, of one policy."""


def read_datums(path: Path, loss: str, settings: Settings | None = None) -> list[tinker.Datum]:
    """Read a training batch as Tinker's datums (`to_datums`)."""
    return to_datums(read(path), loss, settings)


def datums_of_batch(
    spans: Path, roles: Sequence[str], credit: CreditAssignment, method: UpdateMethod
) -> list[tinker.Datum]:
    """Build the datums of one rollout batch, which are those that the whole step has for it.

    That holds as long as credit is assigned within groups, and losses are summed.
    """
    trajectories = trajectories_of([spans], roles)
    batch = datums_of(trajectories, rewards_by_role(trajectories), credit)
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


@dataclass(frozen=True)
class Assigned:
    """Trajectories that are compared with others, and what each of their tokens earned.

    `compared` is what the comparison gave, 0 where a token was not sampled; `advantages` has the
    KL penalty and the entropy bonus as well. Both are lists of arrays of shape [tokens].
    """

    trajectories: pa.Table
    masks: list[np.ndarray]
    compared: list[np.ndarray]
    advantages: list[np.ndarray]


def _assign(
    trajectories: pa.Table,
    rewards: Rewards,
    credit: CreditAssignment,
    references: pa.Table | None,
    history: Sequence[MeanRewards],
) -> Assigned:
    """Assign credit to the tokens of all trajectories but those of groups that are too small."""
    penalties = _penalties(trajectories, credit.penalty, references)
    in_reward = credit.penalty is not None and credit.penalty.placement == "reward"
    calls = calls_of(trajectories, penalties if in_reward else None)
    names = [*zip(*(trajectories[n].to_pylist() for n in ("role", "rollout_id")), strict=True)]
    greedy = greedy_rewards(trajectories)
    baselines = {
        role: Baselines([means[role] for means in history if role in means], greedy.get(role, {}))
        for role in rewards
    }
    earned = _compare(calls, rewards, credit, in_reward, baselines)
    numbers, masks = trajectories["call_numbers"].to_pylist(), arrays(trajectories["mask"])
    places = [place for place, name in enumerate(names) if (*name, numbers[place][0]) in earned]
    compared = [
        _place(masks[place], [earned[*names[place], number] for number in numbers[place]])
        for place in places
    ]
    kept = trajectories.take(pa.array(places, pa.int64()))
    masks = [masks[place] for place in places]
    advantages = compared
    if credit.penalty is not None and penalties is not None and not in_reward:
        lost = credit.penalty.from_advantages([penalties[place] for place in places], masks)
        advantages = [value - less for value, less in zip(advantages, lost, strict=True)]
    if credit.entropy_coefficient:
        advantages = [
            value - credit.entropy_coefficient * np.where(mask != 0, log_q, 0.0)
            for value, log_q, mask in zip(advantages, arrays(kept["logprobs"]), masks, strict=True)
        ]
    if credit.trained_calls is not None:
        masks = _draw_calls(kept, masks, credit.trained_calls, credit.seed)
        advantages = [value * mask for value, mask in zip(advantages, masks, strict=True)]
    return Assigned(kept, masks, compared, advantages)


def _draw_calls(
    trajectories: pa.Table, masks: Sequence[np.ndarray], count: int, seed: int
) -> list[np.ndarray]:
    """Return the masks with `count` calls of all: those whose names have the smallest hashes."""
    names = ("rollout_id", "call_numbers", "call_tokens")
    rows = [*zip(*(trajectories[name].to_pylist() for name in names), strict=True)]
    calls = [(rollout, number) for rollout, numbers, _ in rows for number in numbers]

    def chance(call: tuple[str, int]) -> bytes:
        return sha256(f"{seed} {call[0]} {call[1]}".encode()).digest()

    drawn = {*sorted(calls, key=chance)[:count]}
    return [
        mask * np.repeat([(rollout, number) in drawn for number in numbers], lengths)
        for (rollout, numbers, lengths), mask in zip(rows, masks, strict=True)
    ]


def _penalties(
    trajectories: pa.Table, penalty: Penalty | None, references: pa.Table | None
) -> list[np.ndarray] | None:
    """Compute the penalty of each trajectory's tokens, if the credit assignment has one."""
    if penalty is None:
        return None
    if references is None:
        raise ValueError("the penalty of an algorithm needs the references of the step")
    of_reference = reference_logprobs(references, trajectories)
    lists = (arrays(trajectories[name]) for name in ("logprobs", "mask"))
    return [
        penalty.of_tokens(log_q, log_ref, mask)
        for log_ref, log_q, mask in zip(of_reference, *lists, strict=True)
    ]


def _compare(
    calls: Mapping[tuple[str, str], Calls],
    rewards: Rewards,
    credit: CreditAssignment,
    in_reward: bool,
    baselines: Mapping[str, Baselines],
) -> dict[tuple[str, str, int], np.ndarray]:
    """Map role, rollout and call to the advantages of its tokens; omit groups too small."""
    row = find_advantage(credit.advantage)
    by_token = row.by_token and in_reward
    unit = "token" if by_token else "call" if row.by_call else "rollout"
    earned: dict[tuple[str, str, int], np.ndarray] = {}
    for role, groups in earnings_by_role(calls, rewards, credit.discount, unit).items():
        large = {name: of for name, of in groups.items() if len(of) >= credit.min_group_size}
        advantages = estimate_advantages(
            large, credit.advantage, credit.advantage_settings, baselines[role]
        )
        for rollout, values in advantages.items():
            of_calls = calls[role, rollout]
            tokens = np.array(values) if by_token else _repeat(values, of_calls)
            ends = np.cumsum([call.tokens for call in of_calls.values()])
            parts = np.split(tokens, ends[:-1])
            for number, part in zip(of_calls, parts, strict=True):
                earned[role, rollout, number] = part
    return earned


def _repeat(advantages: Sequence[float], calls: Calls) -> np.ndarray:
    """Repeat the advantage of each call, or the one of all calls, for each sampled token."""
    counts = [call.tokens for call in calls.values()]
    return np.repeat(advantages, counts if len(advantages) == len(counts) else sum(counts))


def _place(mask: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Place the advantages of sampled tokens among the tokens of a trajectory."""
    placed = np.zeros(len(mask))
    placed[mask != 0] = np.concatenate(parts)
    return placed


def _scales(assigned: Assigned, credit: CreditAssignment) -> dict[str, float]:
    """Map each rollout to the factor of its loss."""
    tokens: dict[str, int] = defaultdict(int)
    rollouts = assigned.trajectories["rollout_id"].to_pylist()
    for rollout, mask in zip(rollouts, assigned.masks, strict=True):
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
