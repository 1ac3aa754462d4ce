"""held-out examples that several targets played → a record of how they compare, pair by pair."""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from ratchet.adapters.errors import UserError, counted
from ratchet.tasks.comparison.statistics import CERTAIN, Interval, interval_of_mean
from ratchet.tasks.recording.views import COMPARISONS
from ratchet.tasks.storage.files import is_written, read_json, verified, write_json
from ratchet.tasks.storage.manifest import COMPARED
from ratchet.tasks.storage.run_folder import RunFolder, folder_of, name_run
from ratchet.tasks.storage.tables import query_beside, read_table, select, write_table

PLAYED_QUERY = query_beside(str(Path(__file__).with_name("played")))

MOST_DIFFERENT = 3
"""Number of examples to show of a pair of targets: those that differ most."""

COMPARISON_FILE = "comparison.json"

MOST_ENUMERATED = 14
"""Most differences whose signs are all tried; of more, DRAWS of their signs are drawn."""
DRAWS, DRAWN_AT_ONCE = 20_000, 500

ExampleRow = dict[str, Any]
"""An example as a target played it: a row of COMPARISONS."""


class NotBetter(UserError):
    """Refusal of a target that is not shown to be better."""

    status = 1


class Difference(BaseModel, frozen=True):
    """Mean difference of the rewards of paired examples, theirs less those they are compared with.

    `interval` holds the mean with 95 % confidence; None if there are too few examples. `p_value` is
    the chance of a mean as far from 0 if either reward of an example might have been the other's.
    """

    examples: int
    mean: float | None
    interval: Interval | None
    p_value: float | None
    won: int
    lost: int
    tied: int

    @property
    def is_gain(self) -> bool:
        """Whether chance does not explain the difference, and the interval lies above 0.

        Where every example was won, its width alone is for examples that are not among them.
        """
        if self.interval is None or self.p_value is None:
            return False
        return (self.interval[0] > 0 or self.won == self.examples) and self.p_value <= CERTAIN

    def __str__(self) -> str:
        if self.mean is None or self.interval is None:
            return f"not known from {counted(self.examples, 'example')}"
        lower, upper = self.interval
        return f"{self.mean:+.3f} ({lower:+.3f} to {upper:+.3f}, p = {self.p_value:.3g})"


def find_difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Compare the first of each pair of an example's rewards with the second."""
    differences = [first - second for first, second in pairs]
    won, lost = (sum(sign * one > 0 for one in differences) for sign in (1, -1))
    return Difference(
        examples=len(pairs),
        mean=fmean(differences) if pairs else None,
        interval=interval_of_mean(differences),
        p_value=sign_flip_p_value(differences) if pairs else None,
        won=won,
        lost=lost,
        tied=len(pairs) - won - lost,
    )


class ComparedTarget(BaseModel, frozen=True):
    """A target, the checkpoint that it is, and what it came to on all examples.

    `created` is when its run was made, `evaluation` the file of its scores. `reward` is the mean
    over examples of rollouts that did not fail, `tokens` the mean length of a rollout's answers,
    `cost` what all calls have cost in US dollars, None if no price is known. `difference` compares
    its rewards with the rewards of `against`; the difference of `against` itself is None.
    """

    target: str
    run: str
    step: int
    created: str
    evaluation: str
    rollouts: int
    failed: int
    reward: float | None
    interval: tuple[float, float] | None
    measures: Mapping[str, float] = {}
    """Means of what the agent measures itself."""
    tokens: float | None = None
    cost: float | None = None
    difference: Difference | None = None


class Comparison(BaseModel, frozen=True):
    """Targets that have played the same held-out examples, each compared with `against`."""

    folder: str
    agent: str
    recipe: str
    """Fingerprint of the recipe whose agent, data and seeds all have played."""
    against: str
    examples: int
    targets: tuple[ComparedTarget, ...]

    @property
    def outcome(self) -> str:
        """Differences of the targets, in words."""
        found = ((one.target, one.difference) for one in self.targets if one.difference)
        return "; ".join(f"{name} less {self.against}: {by}" for name, by in found)

    def check_gains(self) -> None:
        """Refuse (NotBetter) a target that is not shown to be better than `against`.

        A failed rollout has no reward: a target with more of them has not gained.
        """
        (other,) = (one for one in self.targets if one.target == self.against)
        for own in self.targets:
            gain = own.difference
            if own is not other and not (gain and gain.is_gain and own.failed <= other.failed):
                raise NotBetter(
                    f"{own.target} is not shown to be better than {other.target}: reward {gain} in "
                    f"{counted(self.examples, 'example')}, {own.failed} and {other.failed} failed "
                    "rollouts. Play more by --examples or, if all were played, add rows to the "
                    "held-out split"
                )


def name_comparison(
    agent: str, recipe: str, targets: Sequence[ComparedTarget], against: str
) -> RunFolder:
    """Return the folder of a comparison, which another one of the same checkpoints shares."""
    asked = [recipe, against, *(one.model_dump_json() for one in targets)]
    digest = sha256(json.dumps(asked).encode()).hexdigest()[:8]
    return folder_of(f"comparisons/{name_run(agent, digest)}")


def read_played(spans: Sequence[Path], roles: Sequence[str]) -> list[ExampleRow]:
    """Read each example of a shard that was played: its reward, and what `roles` said in it."""
    files = [verified(path) for path in spans]
    return select(PLAYED_QUERY, spans=files, roles=[*roles]).to_pylist()


def write_comparison(
    comparison: Comparison, played: Mapping[str, Sequence[ExampleRow]]
) -> Comparison:
    """Write the record of a comparison, unless it is there; return it.

    Raises UserError if one target has played other examples than another.
    """
    run, against = folder_of(comparison.folder), comparison.against
    folder = run.path
    if is_written(folder / COMPARISON_FILE):
        return Comparison.model_validate(read_json(folder / COMPARISON_FILE))
    for name, rows in played.items():
        if _examples(rows) != _examples(played[against]):
            raise UserError(
                f"{name} and {against} have played other examples, since the dataset has changed "
                "between; give another number by --examples, which all play anew"
            )
    rows = [
        {"target": one.target, "run": one.run, "step": one.step, **row}
        for one in comparison.targets
        for row in played[one.target]
    ]
    targets = tuple(
        _compare(one, played[one.target], None if one.target == against else played[against])
        for one in comparison.targets
    )
    whole = comparison.model_copy(update={"targets": targets, "examples": len(played[against])})
    with run.stored(whole=False) as put:
        write_table(pa.Table.from_pylist(rows, schema=COMPARISONS), folder / COMPARED)
        write_json(folder / COMPARISON_FILE, whole.model_dump(mode="json"))
        put()
    return whole


def most_different(comparison: Comparison, target: str) -> list[tuple[ExampleRow, ExampleRow]]:
    """List the examples whose rewards differ most between a target and `against`.

    Of equal differences the first examples come first.
    """
    rows = read_table(folder_of(comparison.folder).path / COMPARED).to_pylist()
    by_target = {name: [*of] for name, of in groupby(rows, lambda row: row["target"])}
    pairs = _pairs(by_target[target], by_target[comparison.against])
    distances = [abs(own["reward"] - other["reward"]) for own, other in pairs]
    ranked = sorted(range(len(pairs)), key=lambda place: -distances[place])
    return [pairs[place] for place in ranked[:MOST_DIFFERENT] if distances[place]]


def _compare(
    target: ComparedTarget, rows: Sequence[ExampleRow], others: Sequence[ExampleRow] | None
) -> ComparedTarget:
    """Return a target with its length, its cost and its difference from the others, if any."""
    tokens = [row["tokens"] for row in rows if row["tokens"] is not None]
    costs = [row["cost"] for row in rows if row["cost"] is not None]
    found: dict[str, object] = {
        "tokens": fmean(tokens) if tokens else None,
        "cost": fsum(costs) if costs else None,
    }
    if others is not None:
        rewards = [(own["reward"], other["reward"]) for own, other in _pairs(rows, others)]
        found["difference"] = find_difference(rewards)
    return target.model_copy(update=found)


def _pairs(
    rows: Sequence[ExampleRow], others: Sequence[ExampleRow]
) -> list[tuple[ExampleRow, ExampleRow]]:
    return [
        (own, other)
        for own, other in zip(rows, others, strict=True)
        if own["reward"] is not None and other["reward"] is not None
    ]


def _examples(rows: Sequence[ExampleRow]) -> list[tuple[int, str]]:
    return [(row["example_id"], row["example"]) for row in rows]


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Fisher's randomization test of paired differences.

    It is the share of all choices of the differences' signs that have a mean as far from 0; of more
    than MOST_ENUMERATED differences it is estimated, always by the same draws. For differences of
    -1, 0 and 1 it is McNemar's exact test.
    """
    moved = np.array([one for one in differences if one], np.float64)
    least = abs(moved.sum()) - 1e-9
    far = [np.abs(signs @ moved) >= least for signs in _choose_signs(len(moved))]
    return float(np.concatenate(far).mean())


def _choose_signs(count: int) -> Iterator[np.ndarray]:
    """Yield choices of signs, a row each: all of them, or the given one and draws."""
    if count <= MOST_ENUMERATED:
        yield (np.arange(2**count)[:, None] >> np.arange(count)) % 2 * 2 - 1
        return
    generator = np.random.default_rng(0)
    yield np.ones((1, count))
    for _ in range(DRAWS // DRAWN_AT_ONCE):
        yield generator.integers(0, 2, (DRAWN_AT_ONCE, count)) * 2 - 1
