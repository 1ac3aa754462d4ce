"""rollouts of a held-out split → scores, with their uncertainty."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, hypot, isclose, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple, TypeVar

from tasks.comparison.differences import interval_of_ratio
from tasks.recording.scores import JUDGED, SCORES, Estimate, Score, Spent, headline, read_evaluation
from tasks.storage.checksums import verified
from tasks.storage.durability import durable
from tasks.storage.files import is_written
from tasks.storage.json_files import write_json
from tasks.storage.names import shard_name
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside, select

T = TypeVar("T")

QUERY = query_beside(__file__)

Z95 = NormalDist().inv_cdf(0.975)
"""1.96: the standard errors on either side of a mean that make its 95 % interval."""


@dataclass(frozen=True)
class Gain:
    """Change of a measure of held-out examples, in an interval that holds it with 95 % confidence.

    It is `paired` if both values are known of each example. Otherwise the interval is that of two
    measures of other examples, which is too wide.
    """

    value: float
    interval: tuple[float, float]
    paired: bool = True

    def __str__(self) -> str:
        lower, upper = self.interval
        unpaired = "" if self.paired else ", as if of other examples"
        return f"{self.value:+.2f} ({lower:+.2f} to {upper:+.2f} with 95 % confidence{unpaired})"


def find_gain(
    before: Sequence[float], after: Sequence[float], weights: Sequence[float]
) -> Gain | None:
    """Find the gain of Σ values / Σ weights over the same examples; None if they are too few."""
    differences = [last - first for first, last in zip(before, after, strict=True)]
    if not differences or (interval := interval_of_ratio(differences, weights)) is None:
        return None
    return Gain(fsum(differences) / fsum(weights), interval)


def find_unpaired_gain(
    before: tuple[float | None, float | None], after: tuple[float | None, float | None]
) -> Gain | None:
    """Find the gain of two values, each with its standard error; None if one is not known."""
    (first, error), (last, other) = before, after
    if first is None or last is None or error is None or other is None:
        return None
    gain, margin = last - first, Z95 * hypot(error, other)
    return Gain(gain, (gain - margin, gain + margin), paired=False)


class ScoredRollout(NamedTuple):
    """End of a rollout, its usage by role, and its agent's measures; a failed one has no reward.

    Nor has one that has `ended`, and that its agent or a judge gives none.
    """

    group_id: str
    reward: float | None
    category: str | None = None
    spent: Mapping[str, Spent] = {}
    ended: bool = False
    measures: Mapping[str, float] = {}


def score_spans(spans: Sequence[Path], shard: Path, threshold: float = 1.0) -> Score:
    """Score the sealed batches of a shard, and each category if its examples have that column.

    A rollout passes if its reward is at least `threshold`.
    """
    return score([*_outcomes(spans, shard).values()], threshold)


def score_verdicts(judged: "JudgedShard", threshold: float) -> Score:
    """Score held-out rollouts by what a judge said of them, and what the judge came to.

    One that has ended and got no verdict counts as one without a reward.
    """
    played, verdicts = judged.played, judged.verdicts
    outcomes = [
        outcome._replace(reward=0.0 if outcome.ended else None, spent={}, measures={})
        if verdicts is None
        else outcome._replace(reward=verdicts.get(name), spent={}, measures={})
        for name, outcome in _outcomes(played.spans, played.shard).items()
    ]
    asked = judged.by
    spent = [one.spent for one in _outcomes(asked.spans, asked.shard).values()] if asked else []
    return score(outcomes, threshold).model_copy(update={"spent": _by_name(spent, _sum)})


def _outcomes(spans: Sequence[Path], shard: Path) -> dict[str, ScoredRollout]:
    """Return the end of each rollout of a shard, by its id."""
    files = [verified(path) for path in spans]
    return {
        row["rollout_id"]: ScoredRollout(
            row["group_id"],
            row["reward"],
            row["category"],
            {of["role"]: Spent.model_validate(of) for of in row["spent"]},
            row["ended"],
            dict(row["measures"]),
        )
        for row in select(QUERY, spans=files, shard=shard).to_pylist()
    }


def score(outcomes: Sequence[ScoredRollout], threshold: float = 1.0) -> Score:
    """Score rollouts, as a whole and by category."""
    categories: dict[str, list[ScoredRollout]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.category is not None:
            categories[outcome.category].append(outcome._replace(category=None))
    finished = [outcome for outcome in outcomes if outcome.reward is not None]
    failed = [one for one in outcomes if one.reward is None and not one.ended]
    return Score(
        rollouts=len(outcomes),
        failed=len(failed),
        threshold=threshold,
        finished=_estimate(finished, threshold),
        failed_as_zero=_estimate([*finished, *failed], threshold),
        spent=_by_name((outcome.spent for outcome in outcomes), _sum),
        measures=_by_name((outcome.measures for outcome in outcomes), fmean),
        categories={name: score(categories[name], threshold) for name in sorted(categories)},
    )


def pass_at(k: int, rollouts: int, passed: int) -> float:
    """Estimate pass@k without bias: 1 - C(n - c, k) / C(n, k), for k <= n (Chen et al. 2021)."""
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} needs k of 1 to {rollouts}, the number of rollouts")
    return (comb(rollouts, k) - comb(rollouts - passed, k)) / comb(rollouts, k)


def interval_of(means: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of examples; None if there are too few.

    If every example is 0 or 1, it is Wilson's score interval (1927), which also holds for few
    examples and for means of 0 and 1. Otherwise it is the mean ± 1.96 standard errors (Miller
    2024), from two examples on.
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


@dataclass(frozen=True)
class PlayedShard:
    """A held-out shard that was played: the file of its examples, and its sealed batches."""

    shard: Path
    spans: Sequence[Path]


@dataclass(frozen=True)
class JudgedShard:
    """A held-out shard, the verdicts on its rollouts by their ids, and the judge's own shard.

    Without `verdicts` each rollout is compared with itself, which is a 0.
    """

    played: PlayedShard
    verdicts: Mapping[str, float] | None
    by: PlayedShard | None = None


@durable
def score_rollouts(
    path: Path,
    played: Mapping[str, PlayedShard],
    threshold: float,
    judged: JudgedShard | None = None,
) -> None:
    """Write the scores of held-out shards, by how they were sampled (`sampled`, `greedy`).

    A judge's scores of those that were sampled are beside them, as `judged`.
    """
    scores = {how: score_spans(p.spans, p.shard, threshold) for how, p in played.items()}
    if judged is not None:
        scores[JUDGED] = score_verdicts(judged, threshold)
    write_json(path, SCORES.dump_python(scores, mode="json"))


def find_reward_gain(run: RunFolder, first: int, last: int) -> Gain | None:
    """Find the gain of the held-out reward between two checkpoints; None if it is not known.

    It is over the examples that both have a reward of, where the rollouts are those of the scores.
    """
    ends = [headline(read_evaluation(run.evaluation(f"{step:05d}"))) for step in (first, last)]
    before, after = (_sampled_means(run, step) for step in (first, last))
    for end, means in zip(ends, (before, after), strict=True):
        same = end.mean is not None and len(means) == end.examples
        if not same or not isclose(fmean(means.values()), end.mean or 0.0, abs_tol=1e-9):
            return find_unpaired_gain(*((one.mean, one.standard_error) for one in ends))
    both = sorted(before.keys() & after.keys())
    return find_gain([before[at] for at in both], [after[at] for at in both], [1.0] * len(both))


def _sampled_means(run: RunFolder, step: int) -> dict[str, float]:
    """Return the mean reward of each held-out example that a checkpoint has sampled, by place."""
    shard = shard_name("test", step)
    spans, path = run.sealed(shard), run.shard(shard)
    rewards: dict[str, list[float]] = defaultdict(list)
    for one in _outcomes(spans, path).values() if spans and is_written(path) else ():
        if one.reward is not None:
            rewards[one.group_id.removeprefix(shard)].append(one.reward)
    return {place: fmean(own) for place, own in rewards.items()}


def _by_name(rollouts: Iterable[Mapping[str, T]], joined: Callable[[list[T]], T]) -> dict[str, T]:
    """Join what rollouts have under each name."""
    by_name: dict[str, list[T]] = defaultdict(list)
    for named in rollouts:
        for name, value in named.items():
            by_name[name].append(value)
    return {name: joined(by_name[name]) for name in sorted(by_name)}


def _sum(parts: Sequence[Spent]) -> Spent:
    costs = [part.cost for part in parts if part.cost is not None]
    return Spent(
        calls=sum(part.calls for part in parts),
        priced=sum(part.priced for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        sampled_tokens=sum(part.sampled_tokens for part in parts),
        cost=fsum(costs) if costs else None,
    )


def _estimate(outcomes: Iterable[ScoredRollout], threshold: float) -> Estimate:
    examples: dict[str, list[float | None]] = defaultdict(list)
    for outcome in outcomes:
        examples[outcome.group_id].append(outcome.reward)
    means = [fmean(reward or 0.0 for reward in rewards) for rewards in examples.values()]
    counts = [
        (len(rewards), sum(reward is not None and reward >= threshold for reward in rewards))
        for rewards in examples.values()
    ]
    fewest = min(map(len, examples.values()), default=0)
    return Estimate(
        examples=len(examples),
        mean=fmean(means) if means else None,
        standard_error=stdev(means) / sqrt(len(means)) if len(means) > 1 else None,
        pass_at={k: fmean(pass_at(k, *count) for count in counts) for k in _doublings(fewest)},
        interval=interval_of(means),
    )


def _doublings(most: int) -> list[int]:
    """Return 1, 2, 4 … and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | ({most} if most else set()))
