"""rollouts of a held-out split → scores, with their uncertainty."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isclose, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from ratchet.tasks.comparison.statistics import (
    Gain,
    find_gain,
    find_unpaired_gain,
    interval_of,
    pass_at,
)
from ratchet.tasks.recording.scores import (
    JUDGED,
    SCORES,
    Estimate,
    Score,
    Spent,
    headline,
    read_evaluation,
)
from ratchet.tasks.storage.files import is_written, verified, write_json
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside, select

T = TypeVar("T")

QUERY = query_beside(__file__)


class ScoredRollout(NamedTuple):
    """End of a rollout, its usage by role, and its agent's measures; a failed one has no reward.

    A rollout that has `ended` has no reward either if its agent, or its judge, gives none.
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
    return score_outcomes([*_outcomes(spans, shard).values()], threshold)


def score_verdicts(judged: "JudgedShard", threshold: float) -> Score:
    """Score held-out rollouts by what a judge said of them, and what the judge came to.

    A rollout that has ended and got no verdict has no reward.
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
    return score_outcomes(outcomes, threshold).model_copy(update={"spent": _by_name(spent, _sum)})


def _outcomes(spans: Sequence[Path], shard: Path) -> dict[str, ScoredRollout]:
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


def score_outcomes(outcomes: Sequence[ScoredRollout], threshold: float = 1.0) -> Score:
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
        categories={
            name: score_outcomes(categories[name], threshold) for name in sorted(categories)
        },
    )


@dataclass(frozen=True)
class PlayedShard:
    """A held-out shard that was played: the file of its examples, and its sealed batches."""

    shard: Path
    spans: Sequence[Path]


@dataclass(frozen=True)
class JudgedShard:
    """A held-out shard, the verdicts on its rollouts by their ids, and the judge's own shard.

    Without `verdicts` each rollout is compared with itself: its score is 0.
    """

    played: PlayedShard
    verdicts: Mapping[str, float] | None
    by: PlayedShard | None = None


def score_rollouts(
    path: Path,
    played: Mapping[str, PlayedShard],
    threshold: float,
    judged: JudgedShard | None = None,
) -> None:
    """Write the scores of held-out shards, by how they were sampled (`sampled`, `greedy`).

    A judge's scores of the sampled rollouts are beside them, as `judged`.
    """
    scores = {how: score_spans(p.spans, p.shard, threshold) for how, p in played.items()}
    if judged is not None:
        scores[JUDGED] = score_verdicts(judged, threshold)
    write_json(path, SCORES.dump_python(scores, mode="json"))


def find_reward_gain(run: RunFolder, first: int, last: int) -> Gain | None:
    """Find the gain of the held-out reward between two checkpoints; None if it is not known.

    The gain is over the examples for which both checkpoints have a reward.
    """
    ends = [headline(read_evaluation(run.evaluation(f"{step:05d}"))) for step in (first, last)]
    before, after = (played_means(run, shard_name("test", step)) for step in (first, last))
    for end, means in zip(ends, (before, after), strict=True):
        same = end.mean is not None and len(means) == end.examples
        if not same or not isclose(fmean(means.values()), end.mean or 0.0, abs_tol=1e-9):
            return find_unpaired_gain(*((one.mean, one.interval) for one in ends))
    both = sorted(before.keys() & after.keys())
    return find_gain([before[at] for at in both], [after[at] for at in both], [1.0] * len(both))


def played_means(run: RunFolder, shard: str) -> dict[str, float]:
    """Return the mean reward of each example of a shard that was played, by its place."""
    spans, path = run.sealed(shard), run.shard(shard)
    rewards: dict[str, list[float]] = defaultdict(list)
    for one in _outcomes(spans, path).values() if spans and is_written(path) else ():
        if one.reward is not None:
            rewards[one.group_id.removeprefix(shard)].append(one.reward)
    return {place: fmean(own) for place, own in rewards.items()}


def _by_name(rollouts: Iterable[Mapping[str, T]], joined: Callable[[list[T]], T]) -> dict[str, T]:
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
    doublings = {1 << power for power in range(fewest.bit_length())} | ({fewest} - {0})
    return Estimate(
        examples=len(examples),
        mean=fmean(means) if means else None,
        standard_error=stdev(means) / sqrt(len(means)) if len(means) > 1 else None,
        pass_at={k: fmean(pass_at(k, *count) for count in counts) for k in sorted(doublings)},
        interval=interval_of(means),
    )
