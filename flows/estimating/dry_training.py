"""Estimate of a run of `train`: from one step of its own recipe, on a few examples."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

from adapters.tinker.prices import prices_of
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import RunRecipe
from tasks.settings.optimizer import Optimizer
from tasks.settings.run import Budget, Tracking
from tasks.settings.stop import Stop
from tasks.spending.dry_run import DrySpending
from tasks.spending.estimate import EstimatedLine, EstimatedRun
from tasks.spending.ledger import PURPOSES
from tasks.spending.ranges import ONE, ZERO_RANGE, Range, share_of_draws, sum_of_draws
from tasks.storage.names import EXAMINER, HELD_OUT_SPLITS, JUDGE
from tasks.storage.run_folder import RunFolder

DRY_SECONDS = 3600
"""Seconds for which a service keeps the checkpoints of a dry run."""

LENGTHS = Range(0.8, 1.0, 1.35)
"""Factor by which training changes the length of answers, on the mean of a run."""
HISTORIES = Range(0.85, 1.0, 1.25)
"""Factor by which it changes prompts, which have earlier answers in them."""
TRAINED_SHARES = Range(0.5, 1.0, 1.5)
"""Factor by which it changes the share of tokens that have an advantage."""
PACE = Range(0.4, 1.0, 1.6)
"""Factor by which the time of later rollouts and updates differs from that of the first ones."""


SUMMED = ("calls", "prompts", "sampled", "cached")
"""Columns of a dry run's groups that are summed."""
SCHEDULE = ("schedule", "warmup_steps", "final_fraction")
"""Keys of an optimizer that need several steps."""


def dry_recipe(recipe: Recipe, examples: int) -> Recipe:
    """Return the recipe with one step of `examples` groups, between two evaluations of as many."""
    rollouts = {
        **{"groups": examples, "rounds": 1, "lag": 0},
        **{"batches": 1, "stream": False, "most_failed": 1.0},
    }
    evaluation = {"every": 0, "examples": min(examples, recipe.evaluation.examples)}
    constant = {name: Optimizer.model_fields[name].default for name in SCHEDULE}
    values = recipe.model_dump()
    values |= {"steps": 1, "epochs": 0, "tracking": Tracking().model_dump()}
    values |= {"stop": Stop().model_dump(), "budget": Budget().model_dump()}
    values["rollouts"] |= rollouts
    values["evaluation"] |= evaluation
    values["optimizer"] |= constant
    values["checkpoints"] |= {"ttl_seconds": DRY_SECONDS}
    values["algorithm"] |= {"trained_calls": None}
    return type(recipe).model_validate(values)


def passes_of(recipe: RunRecipe) -> list[int]:
    """Count how often the service reads a step's datums, for each of its files of datums.

    A loss by weights reads them once more, unless it stands beside another one.
    """
    method = recipe.update_method()
    passes = [0] * method.files
    for number, term in enumerate(method.terms(0)):
        beside = number > 0 and term.file == 0
        passes[term.file] += 2 if term.service_loss().derivative is not None and not beside else 1
    return [count * recipe.optimizer.epochs for count in passes]


class PlayedPart:
    """Estimate of a run by the folder of its dry run, which took some seconds as a whole."""

    def __init__(self, recipe: Recipe, examples: int, folder: RunFolder, seconds: float) -> None:
        self._recipe, self._examples, self._seconds = recipe, examples, seconds
        self._dry = DrySpending(folder)
        evaluation, steps = recipe.evaluation, recipe.steps
        due = [step for step in range(steps + 1) if evaluation.due(step, steps)]
        self._evaluations = len(due) if recipe.holds_out() else 0
        self._held_out = (
            min(evaluation.examples, len(recipe.held_out_split().examples()))
            if self._evaluations
            else 0
        )

    def part(self, name: str) -> EstimatedRun:
        """Return the estimate of a run of this name."""
        lines = _merged([*self._calls(), *self._references(), *self._updates()])
        groups = {split: len(seen) for (split, _, _), seen in self._dry.calls.items()}
        played = sum(many * self._rollouts_of(split) for split, many in groups.items())
        prices = prices_of(self._recipe.model.base)
        return EstimatedRun(name, lines, prices, self._time(lines), played)

    def _rollouts_of(self, split: str) -> int:
        """Return how many rollouts of each example of a split were played, but for a judge's."""
        rollouts, sampled = self._recipe.rollouts.group_size, self._recipe.evaluation.rollouts
        played = {"train": rollouts, "test": 2 * sampled, "greedy": 2}
        return played.get(split, 0)

    def _groups(self) -> Range:
        """Return how many groups the run plays to train on, with the further rounds of steps."""
        rollouts = self._recipe.rollouts
        groups = self._recipe.steps * rollouts.groups
        if rollouts.rounds == 1:
            return ONE * groups
        kept = self._dry.trained(next(iter(self._recipe.policies()))).kept
        share = max(sum(map(bool, kept)) / max(1, len(kept)), 1 / rollouts.rounds)
        return Range(groups, groups / share, groups * rollouts.rounds)

    def _calls(self) -> Iterator[EstimatedLine]:
        """Yield what the calls of agents and judges take."""
        for (split, role, ours), rows in self._dry.calls.items():
            times, draws, seen = self._played(split)
            whole = {kind: _in_parts([row[kind] for row in rows], seen) for kind in SUMMED}
            alone = self._answers_alone(split, rows)
            drift = {"prompts": ONE if alone else HISTORIES, "sampled": LENGTHS}
            tokens = {
                kind: sum_of_draws(whole[kind], draws) * times * by for kind, by in drift.items()
            }
            if alone:
                calls = sum_of_draws(whole["calls"], draws) * times
                most = calls.high * self._recipe.rollouts.max_tokens
                tokens["sampled"] = tokens["sampled"].at_most(most)
            prompts, cached = sum(whole["prompts"]), sum(whole["cached"])
            priced = not ours and all(row["cost"] is not None for row in rows)
            costs = _in_parts([row["cost"] for row in rows], seen) if priced else []
            cost = sum_of_draws(costs, draws) * times * LENGTHS if priced else None
            yield EstimatedLine(
                PURPOSES.get(split, "evaluation"),
                role,
                {**tokens, "trained": ZERO_RANGE},
                cached / prompts if prompts else 0.0,
                ours,
                cost,
            )

    def _answers_alone(self, split: str, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the prompts of a split have nothing in them that was sampled."""
        once = all(row["calls_of_rollout"] <= 1 for row in rows)
        return once and not self._recipe.answerers and split not in (JUDGE, EXAMINER)

    def _played(self, split: str) -> tuple[Range, int, int]:
        """Return how often a split is played, and of how many examples; and how many were seen.

        What a judge is asked of one example, or of one group, is one draw.
        """
        if split in (*HELD_OUT_SPLITS, EXAMINER):
            judged = split == EXAMINER and self._recipe.evaluation.judge.shown() == "pair"
            times = ONE * (self._evaluations - judged)
            return times, self._held_out, min(self._examples, self._held_out)
        count = self._recipe.steps * self._recipe.rollouts.groups
        assert split in ("train", JUDGE), f"rollouts of a split {split} were played"
        return self._groups() * (1 / count), count, self._examples

    def _references(self) -> Iterator[EstimatedLine]:
        """Yield what the reference and the teachers read."""
        for row in self._dry.work():
            if row.purpose == "updates":
                continue
            seen = self._dry.trained(row.role).all
            times = self._times(seen)
            tokens = {
                "prompts": times * (row.tokens["prefill"] + row.tokens["cached"]) * HISTORIES,
                "sampled": self._groups() * (row.tokens["sampled"] / self._examples),
                "trained": ZERO_RANGE,
            }
            read = row.tokens["prefill"] + row.tokens["cached"]
            cached = row.tokens["cached"] / read if read else 0.0
            yield EstimatedLine(row.purpose, row.role, tokens, cached)

    def _times(self, seen: Sequence[int]) -> Range:
        """Return how often the run has the tokens of the dry run's groups, which were `seen`."""
        groups = self._groups()
        total = sum_of_draws(seen, groups.expected)
        return (
            total
            * Range(groups.low / groups.expected, 1.0, groups.high / groups.expected)
            * (1 / max(1, sum(seen)))
        )

    def _updates(self) -> Iterator[EstimatedLine]:
        """Yield what the updates of each policy read, and what its first update is checked by."""
        recipe, passes = self._recipe, passes_of(self._recipe)
        for policy in recipe.policies():
            trained = self._dry.trained(policy)
            tokens = self._times(trained.all) * sum(trained.all) * LENGTHS
            share = self._share(trained.all, trained.kept)
            total = tokens * share * passes[0]
            if len(passes) > 1:
                total += ONE * trained.expert * passes[1] * recipe.steps
            work = [r for r in self._dry.work() if (r.purpose, r.role) == ("updates", policy)]
            once = {kind: sum(row.tokens[kind] for row in work) for kind in ("prefill", "sampled")}
            kinds = {"prompts": ONE * once["prefill"], "sampled": ONE * once["sampled"]}
            yield EstimatedLine("updates", policy, {**kinds, "trained": total})

    def _share(self, seen: Sequence[int], kept: Sequence[int]) -> Range:
        """Return the share of the tokens that have an advantage, and so are trained."""
        algorithm, rollouts = self._recipe.algorithm, self._recipe.rollouts
        if algorithm.regularized or algorithm.penalties() or algorithm.entropy_coefficient:
            return ONE
        shares = [own / one for own, one in zip(kept, seen, strict=True) if one]
        share = (share_of_draws(shares) if shares else Range(0.0, 0.5, 1.0)) * TRAINED_SHARES
        if algorithm.trained_calls is not None:
            calls = [row["calls"] for row in self._dry.calls[("train", "policy", True)]]
            of_step = sum(calls) / len(calls) * rollouts.groups
            share = share.at_most(algorithm.trained_calls / of_step)
        return share.at_most(1.0)

    def _time(self, lines: list[EstimatedLine]) -> Range:
        """Return the seconds of the run: one of latency at the least, or of throughput at most.

        A step of more rollouts than the dry one takes as long if the service has room for all, and
        as many times as long if it is busy; so do updates of more tokens.
        """
        recipe, seconds = self._recipe, self._dry.seconds
        training = sum(seconds.get((split, 0), 0.0) for split in ("train", JUDGE))
        held_out = sum(
            seconds.get((split, step), 0.0)
            for split in (*HELD_OUT_SPLITS, EXAMINER)
            for step in (0, 1)
        )
        updating = sum(self._dry.seconds_of_update(name) for name in recipe.policies())
        once = max(0.0, self._seconds - training - held_out - updating)
        many = self._groups() * (1 / recipe.steps)
        played = self._pace(many.expected) * training
        dry_trained = sum(sum(row.tokens.values()) for row in self._dry.work())
        grown = sum(line.tokens["trained"].expected for line in lines) / recipe.steps
        update = _between(1.0, max(1.0, grown / max(1, dry_trained))) * updating
        step = played + update
        if recipe.rollouts.lag:
            step = Range(
                max(played.low, update.low), max(played.expected, update.expected), step.high
            )
        evaluation = self._pace(self._held_out) * (held_out / 2)
        whole = step * recipe.steps + evaluation * self._evaluations
        return whole * PACE + ONE * once

    def _pace(self, groups: float) -> Range:
        """Return how much longer so many groups take than those of the dry run."""
        size, at_once = self._recipe.rollouts.group_size, self._recipe.rollouts.concurrency
        waves = ceil(groups * size / at_once) / ceil(self._examples * size / at_once)
        return _between(*sorted((waves, groups / self._examples)))


def _in_parts(values: Sequence[float], parts: int) -> list[float]:
    """Sum values, in their order, in so many parts; all alone if they are fewer."""
    parts = min(parts, len(values))
    bounds = [len(values) * part // parts for part in range(parts + 1)]
    return [sum(values[low:high]) for low, high in pairwise(bounds)]


def _between(low: float, high: float) -> Range:
    return Range(low, sqrt(low * high), high)


def _merged(lines: list[EstimatedLine]) -> list[EstimatedLine]:
    """Add the lines of equal purpose, role and service, such as those of both ways of sampling."""
    merged: dict[tuple[str, str, bool], EstimatedLine] = {}
    for line in lines:
        key = (line.purpose, line.role, line.ours)
        before = merged.get(key)
        merged[key] = line if before is None else before + line
    return [merged[key] for key in sorted(merged)]
