"""trajectories × advantages → datums: a Parquet file that is the training batch of a step.

The method of an update says what these datums become at the service.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import tinker

from ratchet.adapters.calls import POLICY
from ratchet.adapters.tinker.live_policy import Pass, ServiceLoss, UpdateRequest
from ratchet.tasks.algorithm.divergences import DIVERGENCE
from ratchet.tasks.algorithm.loss import Columns
from ratchet.tasks.algorithm.losses import complete_of, loss_of
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.credit import Credit, assign_credit
from ratchet.tasks.rewards import rewards_of
from ratchet.tasks.settings.algorithm import Algorithm, CreditAssignment, Divergence
from ratchet.tasks.settings.given import Expert
from ratchet.tasks.settings.run import Optimizer
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.tables import arrays, read_table, write_table
from ratchet.tasks.trajectories import TOKEN_LISTS, trajectories_of

DATUM_SCHEMA = pa.schema(
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

PAIR_DATUM_SCHEMA = pa.schema(
    [
        *DATUM_SCHEMA,
        # The place of the pair in the step, and of the side in SIDES.
        ("pair", pa.int32()),
        ("side", pa.int32()),
        ("references", pa.list_(pa.float32())),
    ]
)
"""Schema of the datums of pairs: each is a part of a side, with what the reference gives it."""

REFERENCE_DATUM_SCHEMA = pa.schema([*DATUM_SCHEMA, ("references", pa.list_(pa.float32()))])
"""Schema of the datums of rollouts with a KL penalty in the loss."""

TAUGHT_DATUM_SCHEMA = pa.schema(
    [
        *DATUM_SCHEMA,
        # The teacher's likeliest tokens at each target in turn, equally many of each.
        ("top_tokens", pa.list_(pa.int32())),
        ("top_logprobs", pa.list_(pa.float32())),
    ]
)
"""Schema of the datums of texts that have a teacher."""

DTYPES = {"target_tokens": np.int64, "pair": np.int64, "side": np.int64}


def datums_of(
    trajectories: pa.Table,
    rewards: pa.Table,
    credit: CreditAssignment,
    references: Mapping[str, pa.Table] | None = None,
) -> pa.Table:
    """Build the training batch: one row in DATUM_SCHEMA per trajectory with a non-zero advantage.

    The rows are in REFERENCE_DATUM_SCHEMA where a penalty is in the loss: the loss is regularized.
    A trajectory whose advantages are zero, unless the loss is regularized, or in which nothing is
    trained, moves no weight and is left out. The trajectories of a group with fewer than
    `credit.min_group_size` rollouts to train on are left out, too.

    A role is compared with the same role of the group's other rollouts (`tasks.credit`), and if
    its calls have rewards, each call with theirs; `advantage` is the mean over the trajectory's
    sampled tokens. Penalties, which read the `references`, by their source, and the entropy bonus
    change `advantages`, not `advantage`.
    At most `trained_calls` calls are trained, if it is given; the masks of others are 0.
    """
    assigned = assign_credit(trajectories, rewards, credit, references or {})
    scales, kept = _scales(assigned, credit.algorithm), assigned.trajectories
    lists = (arrays(kept["tokens"]), arrays(kept["logprobs"]), assigned.masks, assigned.advantages)
    described = kept.drop_columns([*TOKEN_LISTS]).to_pylist()
    referred = assigned.references or repeat(None, kept.num_rows)
    columns = zip(described, *lists, assigned.compared, referred, strict=True)
    rows = []
    for row, tokens, logprobs, mask, advantages, compared, reference in columns:
        if not mask.any() or not (advantages.any() or credit.algorithm.regularized):
            continue
        if mask[0]:
            rollout = row["rollout_id"]
            raise ValueError(f"rollout {rollout} sampled its first token from an empty prompt")
        row["advantage"] = fmean(compared[mask != 0])
        row["scale"] = scales[row["rollout_id"]]
        # All but the inputs move one position to the left: the last sampled token is a target.
        row["tokens"], row["targets"] = tokens[:-1], tokens[1:]
        row["logprobs"], row["advantages"], row["mask"] = logprobs[1:], advantages[1:], mask[1:]
        if reference is not None:
            row["references"] = reference[1:]
        rows.append(row)
    schema = DATUM_SCHEMA if assigned.references is None else REFERENCE_DATUM_SCHEMA
    return pa.Table.from_pylist(rows, schema=schema)


@durable
def build_datums(
    path: Path,
    trajectories: Path,
    rewards: Path,
    credit: CreditAssignment,
    references: Mapping[str, Path] | None = None,
) -> None:
    """Write the datums of a step, maybe no row."""
    scored = {source: read_table(file) for source, file in (references or {}).items()}
    write_table(datums_of(read_table(trajectories), read_table(rewards), credit, scored), path)


def datums_of_batch(spans: Path, roles: Sequence[str], credit: CreditAssignment) -> pa.Table:
    """Build the datums of one rollout batch, equal to the whole step's datums for this batch.

    They are equal as long as credit is assigned within groups, and losses are summed.
    """
    trajectories = trajectories_of([spans], roles)
    return datums_of(trajectories, rewards_of(trajectories), credit)


def to_datums(
    batch: pa.Table, loss: str, settings: Settings | None = None, factor: float = 1.0
) -> list[tinker.Datum]:
    """Convert rows in DATUM_SCHEMA to Tinker's datums, with exactly the inputs that the loss takes.

    Their losses are multiplied by the `factor`.
    """
    inputs, complete = loss_of(loss).inputs, complete_of(loss, settings or {})
    datums = []
    for sequence, columns in zip(arrays(batch["tokens"]), columns_of(batch, factor), strict=True):
        made = {
            name: tinker.TensorData.from_numpy(
                make(columns, complete).astype(DTYPES.get(name, np.float32))
            )
            for name, make in inputs.items()
        }
        model_input = tinker.ModelInput.from_ints(sequence.tolist())
        datums.append(tinker.Datum(model_input=model_input, loss_fn_inputs=made))
    return datums


def columns_of(batch: pa.Table, factor: float = 1.0) -> list[Columns]:
    """Return what losses read of each datum: the lists, the numbers and the scaled factor."""
    columns = {"sampled": [*batch["policy_version"].is_valid().to_numpy()]}
    columns["scale"] = [*(batch["scale"].to_numpy() * factor)]
    for column in batch.schema:
        if pa.types.is_list(column.type):
            columns[column.name] = arrays(batch[column.name])
        elif pa.types.is_integer(column.type):
            columns[column.name] = [*batch[column.name].to_numpy().reshape(-1, 1)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def given_datum(name: str, group: str, tokens: np.ndarray) -> dict[str, Any]:
    """Return the columns of a datum that no policy sampled, without the columns of its loss."""
    return {
        "rollout_id": name,
        "group_id": group,
        "role": POLICY,
        "first_call": 0,
        "policy_version": None,
        "reward": None,
        "advantage": None,
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "logprobs": np.zeros(len(tokens) - 1, np.float32),
    }


def units_of(datums: Sequence[tinker.Datum], loss: str) -> list[list[tinker.Datum]]:
    """Split the datums of a step into the units of a loss, which are never split."""
    if loss_of(loss).unit == "datum":
        return [[datum] for datum in datums]
    units: dict[int, list[tinker.Datum]] = defaultdict(list)
    for datum in datums:
        units[int(datum.loss_fn_inputs["pair"].data[0])].append(datum)
    return [*units.values()]


def _scales(assigned: Credit, algorithm: Algorithm) -> dict[str, float]:
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
        "fixed": lambda _: algorithm.divisor or 1.0,
    }
    divisor = divisors[algorithm.aggregation]
    return {rollout: 1.0 / divisor(count) for rollout, count in trained.items()}


Units = Sequence[Sequence[tinker.Datum]]
"""Datums of a file, in units that are never split between optimizer steps."""


@dataclass(frozen=True)
class Term:
    """A term of a step's loss: a loss of the datums of one file, and the term's factor.

    `file` numbers the file among the step's files of datums.
    """

    loss: str
    settings: Settings
    factor: float = 1.0
    file: int = 0

    def service_loss(self) -> ServiceLoss:
        loss, complete = loss_of(self.loss), complete_of(self.loss, self.settings)
        sent = {} if loss.service_loss == "cross_entropy" else complete
        numbers = {key: float(value) for key, value in sent.items()}
        derivative = None if loss.built_in else partial(loss.derive, complete)
        return ServiceLoss(loss.service_loss, numbers, derivative)


@dataclass(frozen=True)
class UpdateMethod:
    """Method of an update: the loss with its settings, and the optimizer, in a run of `steps`.

    The datums are split evenly, in their order, into the optimizer's `substeps` minibatches with an
    optimizer step each, `epochs` times over; datums of a pair stay together. `by_batch`, of which
    one optimizer step is made, each rollout batch has a forward-backward pass of its own. With an
    `expert`, a step has a second file of datums. Each minibatch gets a part of both files, whose
    losses are weighted 1 - µ and µ. A `divergence` in the loss is a second term of the datums of
    the first file, of the log-probabilities that the pass of the first term returns.
    """

    loss: str
    loss_settings: Settings
    optimizer: Optimizer
    steps: int
    by_batch: bool = False
    expert: Expert = field(default_factory=Expert)
    divergence: Divergence = field(default_factory=Divergence)

    @property
    def files(self) -> int:
        """Number of the files of datums that a step has."""
        return 2 if self.expert.given_texts else 1

    def terms(self, step: int) -> list[Term]:
        """Return the terms of the loss of a step; the first is of the datums of the first file."""
        share = self.expert.share_at(step) if self.expert.given_texts else 0.0
        terms = [Term(self.loss, self.loss_settings, 1 - share)]
        if (penalty := self.divergence).in_loss:
            factor = penalty.coefficient * (1 - share)
            terms.append(Term(DIVERGENCE, {"estimator": penalty.estimator}, factor))
        if self.expert.given_texts:
            terms.append(Term(self.expert.loss, {}, share, file=1))
        return terms

    def request(self, step: int, units: Sequence[Units]) -> UpdateRequest:
        """Request the optimizer steps of a step, by the units of each of its terms.

        Each optimizer step has a part of every term's units, in one pass or, `by_batch`, in a pass
        of each unit.
        """
        terms = self.terms(step)
        parts = min(self.optimizer.substeps, max(map(len, units), default=0))
        epoch = [
            [
                Pass(datums, term.service_loss(), number, term.loss == DIVERGENCE)
                for number, (term, own) in enumerate(zip(terms, of_terms, strict=True))
                for datums in (own if self.by_batch else [[*chain(*own)]])
                if datums
            ]
            for of_terms in zip(*(_split(of_term, parts) for of_term in units), strict=True)
        ]
        adam = self.optimizer.model_dump(include={*tinker.AdamParams.model_fields})
        adam["learning_rate"] *= self.optimizer.share(step, self.steps)
        return UpdateRequest(epoch * self.optimizer.epochs, tinker.AdamParams(**adam))

    def optimizer_steps(self, datums: int) -> int:
        """Count the optimizer steps of a step by the datums of its largest file."""
        return min(self.optimizer.substeps, datums) * self.optimizer.epochs


def _split(units: Units, parts: int) -> list[Units]:
    bounds = [len(units) * part // parts for part in range(parts + 1)] if parts else []
    return [units[low:high] for low, high in pairwise(bounds)]
