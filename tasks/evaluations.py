"""rollouts of a held-out split → scores, with what is not known of them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb, fsum, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from tasks.metrics import COST
from tasks.storage.checksums import verified
from tasks.storage.files import write_text
from tasks.storage.tables import select

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")

Z95 = NormalDist().inv_cdf(0.975)
"""1.96: how many standard errors either side hold the mean with 95 % confidence."""


class Spent(BaseModel):
    """What a role's calls came to that no policy answered.

    `cost` is in US dollars, of the `priced` of its `calls`; None where nobody knows any price.
    """

    model_config = ConfigDict(frozen=True)

    calls: int
    priced: int
    prompt_tokens: int
    sampled_tokens: int
    cost: float | None

    @property
    def tokens(self) -> int:
        """Those that were read and those that were written."""
        return self.prompt_tokens + self.sampled_tokens


class Outcome(NamedTuple):
    """How a rollout ended, and what it spent, by role; a failed one has no reward."""

    group_id: str
    reward: float | None
    category: str | None = None
    spent: Mapping[str, Spent] = {}


class Estimate(BaseModel):
    """Over examples, each counting once, however many rollouts it has.

    `standard_error` is that of the examples' means, for rollouts of one example are not
    independent (Miller 2024); None below two examples. `pass_at[k]` is the chance that the best of
    k rollouts reaches the threshold; a k that some example has too few rollouts for is left out.
    `interval` holds the mean with 95 % confidence, as `interval_of` says.
    """

    model_config = ConfigDict(frozen=True)

    examples: int
    mean: float | None
    standard_error: float | None
    pass_at: dict[int, float]
    interval: tuple[float, float] | None = None


class Score(BaseModel):
    """What a batch of rollouts is worth, stated with its failed rollouts left out and as zeros.

    `spent` is by role, of all rollouts in every attempt.
    """

    model_config = ConfigDict(frozen=True)

    rollouts: int
    failed: int
    threshold: float
    finished: Estimate
    failed_as_zero: Estimate
    spent: dict[str, Spent] = {}
    categories: dict[str, "Score"] = {}

    def metrics(self, prefix: str = "test") -> dict[str, float]:
        """The headline, flat: `test/reward/mean` is over finished rollouts."""
        values = {
            "reward/mean": self.finished.mean,
            "reward/standard_error": self.finished.standard_error,
            "reward/mean_failed_as_zero": self.failed_as_zero.mean,
            "rollouts/failed": self.failed,
            **{f"pass@{k}": value for k, value in self.failed_as_zero.pass_at.items()},
            **{f"{COST}{role}": spent.cost for role, spent in self.spent.items()},
        }
        return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}


def score_spans(spans: Path, shard: Path, threshold: float = 1.0) -> Score:
    """The score of a sealed batch; by category where its examples have a column of that name.

    A rollout passes if its reward is at least `threshold`.
    """
    rows = select(QUERY, spans=verified(spans), shard=shard).to_pylist()
    return score([_outcome(row) for row in rows], threshold)


def score(outcomes: Sequence[Outcome], threshold: float = 1.0) -> Score:
    """The score of some rollouts."""
    categories: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.category is not None:
            categories[outcome.category].append(outcome._replace(category=None))
    finished = [outcome for outcome in outcomes if outcome.reward is not None]
    return Score(
        rollouts=len(outcomes),
        failed=len(outcomes) - len(finished),
        threshold=threshold,
        finished=_estimate(finished, threshold),
        failed_as_zero=_estimate(outcomes, threshold),
        spent=_summed([outcome.spent for outcome in outcomes]),
        categories={name: score(categories[name], threshold) for name in sorted(categories)},
    )


def pass_at(k: int, rollouts: int, passed: int) -> float:
    """The unbiased estimate of Chen et al. (2021): 1 - C(n - c, k) / C(n, k), for k <= n."""
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} needs k of 1 to {rollouts}, the number of rollouts")
    return (comb(rollouts, k) - comb(rollouts - passed, k)) / comb(rollouts, k)


def interval_of(means: Sequence[float]) -> tuple[float, float] | None:
    """Where the mean of these examples lies with 95 % confidence; None where nothing says it.

    Of examples that are each won or lost, Wilson's score interval (1927): it holds for few of them,
    and where none or all are won, which the normal one calls certain. Of others, the mean and 1.96
    standard errors either side of it (Miller 2024).
    """
    count = len(means)
    if count and set(means) <= {0.0, 1.0}:
        won, spread = fmean(means), Z95**2 / count
        centre = (won + spread / 2) / (1 + spread)
        half = sqrt(won * (1 - won) * spread + spread**2 / 4) / (1 + spread)
        return centre - half, centre + half
    if count < 2:
        return None
    half = Z95 * stdev(means) / sqrt(count)
    return fmean(means) - half, fmean(means) + half


def write_evaluation(path: Path, scores: Mapping[str, Score]) -> Path:
    """`path`, holding the scores by how they were sampled, such as `greedy` and `sampled`."""
    return write_text(path, SCORES.dump_json(dict(scores), indent=2).decode() + "\n")


def read_evaluation(path: Path) -> dict[str, Score]:
    """What `write_evaluation` wrote."""
    return SCORES.validate_json(path.read_bytes())


def _outcome(row: Mapping[str, Any]) -> Outcome:
    spent = {of["role"]: Spent.model_validate(of) for of in row["spent"]}
    return Outcome(row["group_id"], row["reward"], row["category"], spent)


def _summed(rollouts: Sequence[Mapping[str, Spent]]) -> dict[str, Spent]:
    """What all rollouts spent, by role."""
    by_role: dict[str, list[Spent]] = defaultdict(list)
    for spent in rollouts:
        for role, own in spent.items():
            by_role[role].append(own)
    return {role: _sum(by_role[role]) for role in sorted(by_role)}


def _sum(parts: Sequence[Spent]) -> Spent:
    costs = [part.cost for part in parts if part.cost is not None]
    return Spent(
        calls=sum(part.calls for part in parts),
        priced=sum(part.priced for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        sampled_tokens=sum(part.sampled_tokens for part in parts),
        cost=fsum(costs) if costs else None,
    )


def _estimate(outcomes: Iterable[Outcome], threshold: float) -> Estimate:
    examples: dict[str, list[float | None]] = defaultdict(list)
    for outcome in outcomes:
        examples[outcome.group_id].append(outcome.reward)
    means = [fmean(reward or 0.0 for reward in rewards) for rewards in examples.values()]
    counts = [
        (len(rewards), sum(reward is not None and reward >= threshold for reward in rewards))
        for rewards in examples.values()
    ]
    fewest = min((rollouts for rollouts, _ in counts), default=0)
    return Estimate(
        examples=len(examples),
        mean=fmean(means) if means else None,
        standard_error=stdev(means) / sqrt(len(means)) if len(means) > 1 else None,
        pass_at={k: fmean(pass_at(k, *count) for count in counts) for k in _doublings(fewest)},
        interval=interval_of(means),
    )


def _doublings(most: int) -> list[int]:
    """1, 2, 4 … and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | ({most} if most else set()))


SCORES = TypeAdapter(dict[str, Score])
