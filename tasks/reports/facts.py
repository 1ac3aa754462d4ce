"""What a run has come to, by its files: each fact is read once, and every screen shows it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.comparison.statistics import Gain
from ratchet.tasks.given.measures import HeldOutMeasure, find_measured_gain, read_measure
from ratchet.tasks.recording.spans import ERROR
from ratchet.tasks.recording.step_log import (
    COST,
    SPENDING,
    USD,
    Metrics,
    read_metrics,
    spent_seconds,
    why_untrained,
)
from ratchet.tasks.settings.run import Budget
from ratchet.tasks.spending.ledger import measure_budget
from ratchet.tasks.storage.dotted_keys import Json, flatten
from ratchet.tasks.storage.files import (
    Damaged,
    FileVersions,
    is_written,
    query_beside,
    read_json,
    version_of,
)
from ratchet.tasks.storage.manifest import (
    FORK,
    REPLAY,
    Manifest,
    describe_parent,
    differences,
    list_changes,
    read_manifest,
    recipe_of,
)
from ratchet.tasks.storage.names import batch_name, parse_batch
from ratchet.tasks.storage.owners import read_openings
from ratchet.tasks.storage.run_folder import RUN_NAME, RunFolder, folder_of

if TYPE_CHECKING:
    from ratchet.tasks.recording.transcripts import RecordedFailure
    from ratchet.tasks.recording.views import Views

MINUTES_QUERY = query_beside(__file__, "curves")

MOST_RUNS, MOST_MEASURES = 10_000, 100_000
"""Runs whose facts are kept in memory, and held-out measures."""

BROKEN = (UserError, OSError, ValueError, KeyError, TypeError, RecursionError)
"""Errors of a run, also of a run with a file that somebody has written by hand."""

STOPPED = "stopped"
"""Beginning of the state of a run that can be continued."""

REWARD, LOSS = "reward", "loss"

Measure = Literal["reward", "loss", "accuracy"]
"""What is measured on held-out examples."""

StepMetrics = Mapping[str, float]


@dataclass(frozen=True)
class HeldOutScore:
    """Mean reward of held-out examples at a checkpoint, with its 95 % interval if there is one."""

    step: int
    played: str
    examples: int
    reward: float
    interval: Sequence[float] | None


@dataclass(frozen=True)
class HeldOutValues:
    """Values of a run's checkpoints on held-out examples, by step, and what they measure."""

    measure: Measure
    by_step: Mapping[int, float]

    @property
    def best(self) -> int:
        """Step of the lowest loss, or else of the highest reward or accuracy; first if equal."""
        choose = min if self.measure == LOSS else max
        return choose(self.by_step, key=lambda step: self.by_step[step])

    @property
    def last(self) -> str:
        """Last value, with its checkpoint, in words; empty without one."""
        return "".join(self.tell([*self.by_step][-1:]))

    def tell(self, steps: Iterable[int]) -> list[str]:
        """Say the values of those of some checkpoints that have one."""
        known = [(step, self.by_step[step]) for step in steps if step in self.by_step]
        return [
            f"held-out {self.measure} {self.write(one)} "
            f"{f'after step {step}' if step else 'before training'}"
            for step, one in known
        ]

    def write(self, *values: float) -> str:
        """Write the first and the last of some values: `0.21 → 0.96`; a loss has three decimals."""
        return describe_ends(values, 3 if self.measure == LOSS else 2)

    def __str__(self) -> str:
        return self.write(*self.by_step.values())


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run. Entry k of `minutes` and of `tokens` is what checkpoint k has cost.

    Minutes are counted by the clock, up to the end of the last rollout, without the times when no
    process had the run open. Tokens are the ones that the policies sampled in training.
    """

    name: str
    metrics: Sequence[StepMetrics]
    policies: Sequence[str]
    minutes: Sequence[float]
    tokens: Sequence[float]
    scores: Sequence[HeldOutScore]
    measures: Mapping[str, Mapping[int, float]]
    """Means of the agent's own measures on held-out examples, by metric and by step."""
    chosen: bool = False
    """Whether it is the run that a sweep has chosen."""
    arm: str = ""
    """Arm of a sweep over seeds that it is a run of."""
    arms: Sequence[str] = ()
    """All arms of that sweep, whose colours are in this order."""

    @property
    def line(self) -> str:
        """Name of the line that shows the run: its arm's, or its own."""
        return self.arm or self.name

    def of_policy(self, policy: str) -> list[StepMetrics]:
        """Return the metrics of a policy, under their plain names, by step."""
        if policy == POLICY:
            return [*self.metrics]
        prefix = f"policies/{policy}/"
        return [
            {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
            for row in self.metrics
        ]


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run. Each is read when it is first asked for, and kept.

    A damaged file raises an error of BROKEN whenever one of its facts is asked for.
    """

    run: RunFolder

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def is_named(self) -> bool:
        """True if commands, and addresses of the board, can name the run."""
        return RUN_NAME.fullmatch(self.name) is not None

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.run)

    @cached_property
    def trouble(self) -> str:
        """Why the manifest cannot be read; empty if it can."""
        try:
            _ = self.keys, self.agent, self.created, self.parent
        except BROKEN as error:
            return explain(error)
        return ""

    @property
    def recipe(self) -> Manifest:
        return self.manifest["recipe"]

    @cached_property
    def keys(self) -> Mapping[str, Json]:
        return flatten(self.recipe)

    @property
    def agent(self) -> str:
        """Agent that the run trains, or the flow of a run that plays no agent."""
        return str(self.recipe.get("agent") or self.recipe["flow"])

    @property
    def created(self) -> str:
        return str(self.manifest["created"])

    @property
    def parent(self) -> str:
        """Checkpoint that the run forks or starts from, or the run that a replay trains on."""
        return describe_parent(self.manifest)

    @property
    def steps(self) -> int:
        """Steps that the run has when it is finished."""
        return self.run.steps_of(int(str(self.recipe["steps"])))

    @property
    def ended_early(self) -> str:
        """Why the run is finished with fewer steps than its recipe has; empty if it is not."""
        return self.run.why_ended() if self.done >= self.steps else ""

    @property
    def is_fork(self) -> bool:
        """Whether the run shares its first steps with its parent."""
        return self.manifest.get("parent", {}).get("how") == FORK

    @property
    def is_replay(self) -> bool:
        """Whether the run is trained on the rollouts of its parent."""
        return self.manifest.get("parent", {}).get("how") == REPLAY

    @cached_property
    def metrics(self) -> Sequence[Metrics]:
        return read_metrics(self.run.metrics)

    @property
    def done(self) -> int:
        return len(self.metrics)

    @cached_property
    def tokens(self) -> Sequence[float]:
        """Tokens that the policies have sampled in training, up to each checkpoint."""
        policies = self.run.policies()
        names = ["tokens/sampled", *(f"policies/{name}/tokens/sampled" for name in policies)]
        return [0.0, *accumulate(sum(row.get(name, 0) for name in names) for row in self.metrics)]

    @cached_property
    def cost(self) -> float | None:
        """Cost of the steps in US dollars, the service's and helpers'; None without any price."""
        priced = (COST, f"{SPENDING}{USD}")
        costs = [row[key] for row in self.metrics for key in row if key.startswith(priced)]
        return fsum(costs) if costs else None

    @property
    def reward(self) -> float | None:
        return self.metrics[-1].get("reward/mean") if self.metrics else None

    @property
    def seconds(self) -> float:
        """Seconds of sampling and training, which are no duration with a lag."""
        return spent_seconds(self.metrics)

    @property
    def own_seconds(self) -> float:
        """Seconds of the steps that the run has trained itself, which a fork shares with no run."""
        return spent_seconds(self.metrics[self.manifest.get("parent", {}).get("step", 0) :])

    @property
    def drift(self) -> tuple[float, ...]:
        """Distance of each step's weights from the weights that sampled its rollouts."""
        found = (row.get("kl_sample_train_v2") for row in self.metrics)
        return tuple(value for value in found if value is not None)

    @property
    def untrained(self) -> Sequence[str]:
        """Why steps have trained nothing, a reason for each such step."""
        return [*filter(None, map(why_untrained, self.metrics))]

    def sum(self, metric: str) -> int:
        """Sum a metric that counts, such as `rollouts/failed`."""
        return sum(int(row.get(metric, 0)) for row in self.metrics)

    @cached_property
    def _evaluations(self) -> Sequence["_Evaluation"]:
        own = [path for path in self.run.evaluations() if path.stem.isdecimal()]
        return [_read_evaluation(path, version_of([path])) for path in own]

    @property
    def scores(self) -> Sequence[HeldOutScore]:
        """Held-out scores of the run's own evaluations, in the order of checkpoints."""
        return [score for scores, _ in self._evaluations for score in scores]

    @property
    def own_measures(self) -> Mapping[str, Mapping[int, float]]:
        """Means of what the agent measures itself on held-out examples, by name and by step."""
        found = defaultdict[str, dict[int, float]](dict)
        for _, measures in self._evaluations:
            for name, (step, value) in measures.items():
                found[name][step] = value
        return found

    @property
    def own_gains(self) -> str:
        """First and last mean of each of these measures, in words; empty without one."""
        named = self.own_measures.items()
        return ", ".join(f"{name} {describe_ends([*of.values()])}" for name, of in named)

    @cached_property
    def headlines(self) -> Sequence[HeldOutScore]:
        """Score of each checkpoint: the mean reward when sampled, or else a judge's score."""
        by_step: dict[int, HeldOutScore] = {}
        for how in ("sampled", "judged"):
            for score in self.scores:
                if score.played == how:
                    by_step.setdefault(score.step, score)
        return [by_step[step] for step in sorted(by_step)]

    @cached_property
    def held_out(self) -> HeldOutValues:
        """Value of each measured checkpoint: a reward, a loss or an accuracy."""
        if files := self.run.measures():
            found = {int(path.stem): _read_value(path, version_of([path])) for path in files}
            measure = next(iter(found.values()))[0]
            return HeldOutValues(measure, {step: value for step, (_, value) in found.items()})
        return HeldOutValues(REWARD, {score.step: score.reward for score in self.headlines})

    def measures(self) -> list[HeldOutMeasure]:
        """Read the measures on held-out texts or pairs, by checkpoint, of a run that has some."""
        return [read_measure(path) for path in self.run.measures()]

    @cached_property
    def gain(self) -> Gain | None:
        """Gain of the held-out value from its first checkpoint to its last; None if unknown."""
        if len(steps := [*self.held_out.by_step]) < 2:
            return None
        ends = steps[0], steps[-1]
        if self.held_out.measure == REWARD:
            from ratchet.tasks.evaluations import find_reward_gain  # loads slowly, with DuckDB

            return find_reward_gain(self.run, *ends)
        before, after = (read_measure(self.run.measure(step)) for step in ends)
        return find_measured_gain(before, after)

    def state(self, is_open: bool) -> str:
        """Say what state the run is in, and whether it is served."""
        is_served = is_open and self.run.is_served()
        if is_open and not is_served:
            return "running"
        finished = "finished early" if self.ended_early else "finished"
        state = finished if self.done >= self.steps else ", ".join([STOPPED, *self._doubts()])
        return f"{state}, served" if is_served else state

    def _doubts(self) -> Iterator[str]:
        for policy in self.run.policies():
            of = "" if policy == POLICY else f" of {policy}"
            if (doubtful := Ledger(self.run.checkpoints(policy)).in_doubt()) is not None:
                yield f"update {doubtful - 1}{of} in doubt"
        budget = Budget.model_validate(recipe_of(self.run).get("budget", {}))
        if measure_budget(self.run, budget).share >= 1:
            yield "its budget is spent"

    def last_failure(self) -> "RecordedFailure | None":
        """Return the last error of the last step, if a rollout of it has failed.

        A step that is under way, or that stopped the run, counts as far as it is sealed. Whatever
        failed before it is mended.
        """
        from ratchet.tasks.recording.transcripts import read_failures  # likewise

        failed = [int(row["step"]) for row in self.metrics[-1:] if row.get("rollouts/failed")]
        for step in (self.done, *failed):
            spans = [self.run.spans(batch) for batch in self.run.batches_of(step)]
            if sealed := [path for path in spans if is_written(path)]:
                known = (failure for failure in read_failures(sealed) if failure.kind == ERROR)
                return next(known, None)
        return None

    def curves(self, views: "Views | None" = None) -> RunCurves:
        """Return the curves of the run; its minutes are read from the spans in `views`."""
        own = {MEASURE + name: of for name, of in self.own_measures.items()}
        known = self.metrics, self.run.policies(), (), self.tokens, self.scores, own
        curves = RunCurves(self.run.name, *known)
        return curves if views is None else replace(curves, minutes=self._minutes(views))

    def _minutes(self, views: "Views") -> list[float]:
        """Return the minutes of the run at which the rollouts of each step had ended."""
        openings = read_openings(self.run.owners)
        minutes = dict(views.execute(MINUTES_QUERY, {"openings": openings}).fetchall())
        batches = defaultdict[int, list[str]](list)
        for name in map(parse_batch, minutes):
            if name.split == "train":
                batches[name.step].append(batch_name(name.shard, name.number))
        passed = [0.0]
        for step in range(self.done):
            ended = [minutes[batch] for batch in batches[step] if batch in minutes]
            passed.append(max([passed[-1], *ended]))
        return passed


def read_facts(run: RunFolder) -> RunFacts:
    """Return the facts of a run; they are read anew only if its files have changed."""
    held_out = run.evaluation("any").parent, run.measure(0).parent
    version, kept = version_of([run.manifest, run.metrics, *held_out]), _newest(run)
    if (facts := kept.get(version)) is None:
        facts = RunFacts(run)
        kept.clear()
        kept[version] = facts
    return facts


@lru_cache(MOST_RUNS)
def _newest(_: RunFolder) -> dict[FileVersions, RunFacts]:
    """Return what is known of a run: its facts by the version of its files."""
    return {}


@lru_cache(MOST_MEASURES)
def _read_value(path: Path, _version: FileVersions) -> tuple[Measure, float]:
    found = read_json(path)
    return found["measure"], float(found["value"])


_Evaluation = tuple[Sequence[HeldOutScore], Mapping[str, tuple[int, float]]]
"""Scores of an evaluation, and what the agent has measured when sampled, at which step."""


@lru_cache(MOST_MEASURES)
def _read_evaluation(path: Path, _version: FileVersions) -> _Evaluation:
    step, scores = int(path.stem), read_json(path)
    measures = scores.get("sampled", {}).get("measures", {})
    return [
        HeldOutScore(step, how, known["examples"], known["mean"], known.get("interval"))
        for how, score in scores.items()
        if (known := score["finished"])["mean"] is not None
    ], {name.removeprefix(MEASURE): (step, value) for name, value in measures.items()}


def kind_of(error: Exception) -> str:
    """Say in a word what an error makes of a run."""
    return "damaged" if isinstance(error, Damaged) else "unreadable"


def explain(error: Exception) -> str:
    """Say why a run cannot be shown."""
    known = isinstance(error, UserError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def describe_ends(values: Sequence[float], digits: int = 2) -> str:
    """Write the first and the last of some values, with this number of decimals: `0.21 → 0.96`."""
    return " → ".join(f"{value:.{digits}f}" for value in [*values[:1], *values[1:][-1:]])


def metric_names(runs: Sequence[RunCurves]) -> list[str]:
    """List the metrics that any step of any run has, in the order of their first step."""
    rows = [row for run in runs for row in run.metrics]
    return [*dict.fromkeys(name for row in rows for name in row if name != "step")]


def describe_origin(run: RunFolder) -> str:
    """Say where a run comes from: the checkpoint that it started at, or what it forked from.

    For a fork it says the steps, the parent's held-out value before, and the changes. The parent's
    value is of its last scored checkpoint up to the fork. Without an origin it is empty.
    """
    facts = read_facts(run)
    if not facts.is_fork:
        start = facts.recipe["model"].get("start")
        return "\n".join([*([f"started at {start}"] if start else []), *list_changes(run)])
    parent, values = facts.manifest["parent"], facts.held_out
    name, shared = parent["run"], parent["step"]
    since = f"{counted(facts.done - shared, 'step')} since {name}@{shared}"
    changes = differences(parent["recipe"], facts.recipe)
    known = dict(values.by_step)
    with suppress(Damaged):  # the parent of a fork may be gone or damaged
        known |= read_facts(folder_of(name)).held_out.by_step
    scored, before = max(((s, v) for s, v in known.items() if s <= shared), default=(shared, None))
    if before is None:
        said = f"{since}, up to which nothing is scored"
    elif scored < shared:
        said = f"{since}; {name}@{scored} had held-out {values.measure} {values.write(before)}"
    else:
        after = [values.by_step[facts.done]] if facts.done in values.by_step else []
        said = f"{since}: held-out {values.measure} {values.write(before, *after)}"
    return "\n".join([said, *changes, *list_changes(run)])


def ask_failures(run: str) -> str:
    """Return the command that lists the failed rollouts of the named run, with their errors."""
    return f"ratchet sql --run {run} 'from failures'"
