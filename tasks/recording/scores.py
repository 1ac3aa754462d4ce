"""The scores of a checkpoint on held-out examples, as an evaluation's file has them."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ratchet.tasks.recording.step_log import COST
from ratchet.tasks.storage.files import is_written, read_json

JUDGED = "judged"
"""The score of sampled rollouts by a judge of evaluations."""


class Spent(BaseModel):
    """Usage of a role that no policy answers.

    `cost` is in US dollars. It covers the `priced` calls among its `calls`; None without a price.
    """

    model_config = ConfigDict(frozen=True)

    calls: int
    priced: int
    prompt_tokens: int
    sampled_tokens: int
    cost: float | None

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers together."""
        return self.prompt_tokens + self.sampled_tokens


class Estimate(BaseModel):
    """Estimate over examples; each example counts once, however many rollouts it has.

    `standard_error` is taken over the examples' means, since rollouts of one example are not
    independent (Miller 2024); it is None below two examples. `pass_at[k]` is the chance that the
    best of k rollouts reaches the threshold; a k for which some example has too few rollouts is
    left out. `interval` holds the mean with 95 % confidence (`interval_of`).
    """

    model_config = ConfigDict(frozen=True)

    examples: int
    mean: float | None
    standard_error: float | None
    pass_at: dict[int, float]
    interval: tuple[float, float] | None = None


class Score(BaseModel):
    """Score of rollouts, with the failed ones left out (`finished`) and counted as zeros.

    `spent` is the usage by role, over all rollouts and attempts. `measures` are means.
    """

    model_config = ConfigDict(frozen=True)

    rollouts: int
    failed: int
    threshold: float
    finished: Estimate
    failed_as_zero: Estimate
    spent: dict[str, Spent] = {}
    measures: dict[str, float] = {}
    categories: dict[str, "Score"] = {}

    def metrics(self, prefix: str = "test") -> dict[str, float]:
        """Return the headline as flat metrics: `test/reward/mean` is over finished rollouts."""
        values = {
            "reward/mean": self.finished.mean,
            "reward/standard_error": self.finished.standard_error,
            "reward/mean_failed_as_zero": self.failed_as_zero.mean,
            "rollouts/failed": self.failed,
            **{f"pass@{k}": value for k, value in self.failed_as_zero.pass_at.items()},
            **self.measures,
            **{f"{COST}{role}": spent.cost for role, spent in self.spent.items()},
        }
        return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}


SCORES = TypeAdapter(dict[str, Score])


def headline(scores: Mapping[str, Score]) -> Estimate:
    """Return the estimate that stands for a checkpoint: of the agent's rewards, when sampled.

    Where the agent gives no reward, it is the judge's estimate.
    """
    own = scores["sampled"].finished
    return scores[JUDGED].finished if own.mean is None and JUDGED in scores else own


def read_evaluation(path: Path) -> dict[str, Score]:
    """Read the scores that `score_rollouts` wrote, by how the rollouts were sampled."""
    return SCORES.validate_python(read_json(path))


def is_scored(path: Path) -> bool:
    """Return whether an evaluation is on disk, and not only failures in any way of sampling."""
    scores = read_evaluation(path).values() if is_written(path) else ()
    return bool(scores) and all(score.failed < score.rollouts for score in scores)
