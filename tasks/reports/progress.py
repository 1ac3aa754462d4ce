"""A run's files → what the run is doing now: its step, its rollouts, its speed, the time left.

Nothing here changes the run, so another process may look at it as well as the run's own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, quantiles

import pyarrow.parquet as pq

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import on_one_line
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.recording.journal import JournalTail
from ratchet.tasks.recording.spans import BEGUN, ERROR, LLM, REWARD, Span
from ratchet.tasks.recording.step_log import Metrics, why_untrained
from ratchet.tasks.reports.facts import RunFacts, describe_ends, read_facts
from ratchet.tasks.spending.work_log import granted_at
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import Manifest
from ratchet.tasks.storage.names import BatchName, batch_name, parse_batch, shard_name
from ratchet.tasks.storage.owners import read_openings
from ratchet.tasks.storage.run_folder import TRAINED_SPLITS, RunFolder
from ratchet.tasks.storage.tables import read_table

WINDOW = timedelta(seconds=30)
"""Time over which tokens a second are measured; a run opened since has a shorter time."""

BARS, BAR_WIDTH = "▁▂▃▄▅▆▇█", 40
"""Bars of a curve in a line of text, and their largest number."""

MEASURES = {"reward/mean": ("reward", 2), "loss": ("loss", 3)}
"""Metrics that describe a step, with their decimals: the first metric that the step has counts."""

SAMPLING_COLUMNS = ("kind", "ended", "gen_ai_usage_output_tokens", "recalled")
"""Columns of spans that give the speed of sampling."""

UNITS = ((3600, "h"), (60, "min"), (1, "s"))

_Sampled = tuple[datetime, int]
"""When a call ended, and the tokens that it has sampled."""


@dataclass(frozen=True)
class Progress:
    """State of a run: `done` of its `steps` are trained, and `doing` describes the next one.

    `measure` describes the last step's reward or loss; `held_out` describes the last evaluation.
    `seconds_left` is a range, by the quicker and the slower quarter of the steps so far; None
    before the first has ended. `failure` is a rollout's last error.
    """

    done: int
    steps: int
    doing: str = "starting"
    measure: str = ""
    held_out: str = ""
    in_flight: int = 0
    tokens_per_second: float = 0.0
    seconds_left: tuple[float, float] | None = None
    failure: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.doing, self.pace, self.measure, self.held_out]))

    @property
    def pace(self) -> str:
        """Speed of sampling and the time left, in words."""
        parts = [
            f"{self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else "",
            "" if self.seconds_left is None else describe_seconds_left(self.seconds_left),
        ]
        return ", ".join(filter(None, parts))


def describe_step(run: RunFolder, metrics: Metrics) -> str:
    """Describe a step that has ended in a line: reward, what was measured, lengths and seconds."""
    step, facts = int(metrics["step"]), read_facts(run)
    answers = metrics.get("calls", 0)
    measured = [step + 1] if step else [0, 1]
    if "rollouts" in facts.recipe:
        measured = [step - facts.recipe["rollouts"]["lag"]]
    parts = [
        describe_measure(metrics) or "no reward",
        f"nothing trained: {why}" if (why := why_untrained(metrics)) else "",
        *facts.held_out.tell(measured),
        f"{metrics['tokens/sampled'] / answers:.1f} tokens an answer" if answers else "",
        *(f"{seconds:.0f} s" for seconds in step_seconds(run, range(step, step + 1))),
    ]
    return f"step {step + 1} of {facts.steps}: {', '.join(filter(None, parts))}"


def describe_measure(metrics: Mapping[str, float]) -> str:
    """Say what a step has earned: its mean reward, or its loss; empty if it has neither."""
    measured = ((metrics[key], *named) for key, named in MEASURES.items() if key in metrics)
    return next((f"{word} {value:.{digits}f}" for value, word, digits in measured), "")


def describe_run(run: RunFolder, progress: Progress, *, is_open: bool) -> str:
    """Describe a run in lines: its state, what it does, its curve, and its last failure.

    How fast it is and how long it lasts are said only while a process has it open.
    """
    facts = read_facts(run)
    measure = next((key for key in MEASURES if any(key in row for row in facts.metrics)), "")
    values = [row[measure] for row in facts.metrics if measure in row]
    calls = f"{counted(progress.in_flight, 'call')} in flight"
    lines = [
        f"{run.name}: {calls if is_open else facts.state(is_open=False)}",
        ", ".join(filter(None, [progress.doing, progress.measure])),
        progress.held_out,
        progress.pace if is_open else "",
        f"{MEASURES[measure][0]} by step {draw_line(values)} {describe_ends(values)}"
        if values
        else "",
        f"last failure: {progress.failure}" if progress.failure else "",
    ]
    return "\n".join(filter(None, lines))


def draw_line(values: Sequence[float]) -> str:
    """Draw values as at most BAR_WIDTH bars; a bar is the mean of equally many values in turn."""
    size = ceil(len(values) / BAR_WIDTH)
    means = [fmean(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def describe_seconds_left(left: tuple[float, float]) -> str:
    """Describe a range of seconds in the unit that fits it: `40 s left`, `2 to 3 min left`."""
    low, high = left
    size, unit = next((size, unit) for size, unit in UNITS if high >= size or size == 1)
    texts = dict.fromkeys(f"{max(1, seconds / size):.0f}" for seconds in (low, high))
    return f"{' to '.join(texts)} {unit} left"


def step_seconds(run: RunFolder, steps: range) -> list[float]:
    """Return the seconds that each of some steps took, by the times of its files.

    A step begins when the step before it ended, or when the run was opened again since.
    """
    opened = [time.timestamp() for time in _opened(run)]
    begun = [run.shard(shard_name("train", 0)), *run.given_files()[-1:]]
    if steps.start > 0:
        begun = [run.update(POLICY, steps.start - 1)]
    files = [*begun, *(run.update(POLICY, step) for step in steps)]
    ends = [path.stat().st_mtime for path in files if is_written(path)]
    return [
        end - max([begin, *(again for again in opened if again < end)])
        for begin, end in pairwise(ends)
    ]


def _opened(run: RunFolder) -> list[datetime]:
    """Return when processes have opened the run, to the second, or went on after a wait."""
    said = read_openings(run.owners)
    opened = [datetime.fromisoformat(one.replace(" UTC", "Z")) for one in said]
    return [*opened, *granted_at(run)]


class ProgressReader:
    """Reader of a run's progress; each look reads what was added since the last look."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._batches: dict[Path, _Batch] = {}
        self._looked_at: set[str] = set()
        """Sealed batches that an earlier look has seen."""
        self._recent: dict[Path, list[_Sampled]] = {}
        self._seconds: list[float] = []
        """Seconds of the steps that are done."""
        self._done, self._failure = -1, ""

    def look(self) -> Progress:
        """Read what the run is doing; Damaged if a file that it reads is damaged."""
        if not self.run.exists():
            return Progress(0, 0)
        facts = read_facts(self.run)
        recipe, done, steps = facts.recipe, facts.done, facts.steps
        self._read_steps(facts)
        sealed = self.run.sealed_batches()
        under_way = sorted(self.run.begun_batches() - sealed)
        batches = self._read_journals([self.run.journal(batch) for batch in under_way])
        by_shard: dict[str, dict[int, _Batch]] = defaultdict(dict)
        for batch in batches:
            by_shard[batch.name.shard][batch.name.number] = batch
        played = [_count_rollouts(self.run, under_way, recipe) for under_way in by_shard.values()]
        return Progress(
            done,
            steps,
            _describe(self.run, played, done, steps),
            describe_measure(facts.metrics[-1]) if done else "",
            facts.held_out.last,
            sum(len(batch.in_flight) for batch in batches),
            self._tokens_per_second(sealed) if played else 0.0,
            _seconds_left(self._seconds, steps - done),
            self._failure,
        )

    def _read_steps(self, facts: RunFacts) -> None:
        """Read what the steps that have ended since took, and the last error of sealed batches.

        The journals of these batches may not have been seen.
        """
        if facts.done < self._done:  # another run of the name
            self._done, self._seconds = -1, []
        if facts.done > self._done:
            if failed := facts.last_failure():
                self._failure = _first_line(failed.error)
            self._seconds += step_seconds(self.run, range(max(self._done, 0), facts.done))
            self._done = facts.done

    def _read_journals(self, journals: Sequence[Path]) -> list["_Batch"]:
        """Read on in the journals of unsealed batches; return these batches."""
        for path in [path for path in self._batches if path not in journals]:
            del self._batches[path]
        for path in journals:
            batch = self._batches.setdefault(path, _Batch(path))
            for span in batch.read():
                if span["kind"] == ERROR:
                    said = f"{span['error_type']}: {span['error_message']}"
                    self._failure = _first_line(said)
        return [*self._batches.values()]

    def _tokens_per_second(self, sealed: set[str]) -> float:
        """Measure the speed of sampling, also in batches that were sealed since the last look."""
        now = datetime.now(UTC)
        since = max([now - WINDOW, *_opened(self.run)])
        found = [*self._recent, *map(self.run.spans, sealed - self._looked_at)]
        self._looked_at = sealed
        recent = [path for path in found if path.stat().st_mtime >= since.timestamp()]
        self._recent = {
            path: self._recent.get(path) or _sampled(read_table(path, SAMPLING_COLUMNS).to_pylist())
            for path in recent
        }
        calls = chain(*(batch.sampled for batch in self._batches.values()), *self._recent.values())
        tokens = sum(tokens for ended, tokens in calls if ended >= since)
        return tokens / max(1.0, (now - since).total_seconds())


def _sampled(spans: Iterable[Span]) -> list[_Sampled]:
    """Return when calls ended, and how many tokens each has sampled: 0 for a recalled call."""
    calls = [span for span in spans if span["kind"] == LLM and not span.get("recalled")]
    return [(span["ended"], span["gen_ai_usage_output_tokens"] or 0) for span in calls]


def _first_line(error: str) -> str:
    return on_one_line(error.partition("\n")[0])


class _Batch:
    """A batch under way: its rollouts that have ended, and its calls that have no answer."""

    def __init__(self, journal: Path) -> None:
        self.name = parse_batch(journal.stem)
        self._tail = JournalTail(journal)
        self._begin()

    def _begin(self) -> None:
        self.ended: set[str] = set()
        self.in_flight: set[tuple[str, str, int]] = set()
        self.sampled: list[_Sampled] = []

    def read(self) -> list[Span]:
        """Read on in the journal; return what has been added.

        The journal of a batch that is played anew is read from its beginning.
        """
        added, anew = self._tail.read()
        if anew:
            self._begin()
        self.sampled += _sampled(added)
        for span in added:
            kind, rollout = span["kind"], span["rollout_id"]
            if kind == BEGUN:
                self.in_flight.add((rollout, span["role"], span["call"]))
            elif kind == LLM:
                self.in_flight.discard((rollout, span["role"], span["call"]))
            elif kind in (REWARD, ERROR):
                self.ended.add(rollout)
                self.in_flight = {call for call in self.in_flight if call[0] != rollout}
        return added


@dataclass(frozen=True)
class _PlayedShard:
    """A shard that is being played: the number of its ended rollouts, and of all."""

    name: BatchName
    ended: int
    rollouts: int

    @property
    def trained(self) -> bool:
        return self.name.split in TRAINED_SPLITS


def _count_rollouts(
    run: RunFolder, under_way: Mapping[int, _Batch], recipe: Manifest
) -> _PlayedShard:
    """Count a shard's rollouts, by its batches under way; a sealed batch has ended whole."""
    name = next(iter(under_way.values())).name
    if name.split == "train":
        group_size = recipe["rollouts"]["group_size"]
    else:
        group_size = recipe["evaluation"]["rollouts"] if name.split.startswith("test") else 1
    rows = read_shard(run.shard(name.shard))
    begun = max(row["round"] for row in rows if row["batch"] in under_way)
    of_batch = Counter(row["batch"] for row in rows if row["round"] <= begun)
    played = {number: count * group_size for number, count in of_batch.items()}
    ended = sum(
        len(under_way[number].ended) if number in under_way else count
        for number, count in played.items()
        if number in under_way or is_written(run.spans(batch_name(name.shard, number)))
    )
    return _PlayedShard(name, ended, sum(played.values()))


def _total(shards: Iterable[_PlayedShard]) -> tuple[int, int]:
    """Return the number of ended rollouts of shards, and of all."""
    counts = [(shard.ended, shard.rollouts) for shard in shards]
    return sum(ended for ended, _ in counts), sum(rollouts for _, rollouts in counts)


def _describe(run: RunFolder, played: Iterable[_PlayedShard], done: int, steps: int) -> str:
    """Describe the shards that are being played, trained shards first, or what follows them."""
    counted: dict[str, list[_PlayedShard]] = defaultdict(list)
    for shard in sorted(played, key=lambda shard: (not shard.trained, shard.name.step)):
        step = shard.name.step
        scored = f"scoring {f'checkpoint {step}' if step else 'the base model'}"
        counted[f"step {step + 1} of {steps}" if shard.trained else scored].append(shard)
    totals = {what: _total(shards) for what, shards in counted.items()}
    parts = [f"{what}: {ended} of {count} rollouts" for what, (ended, count) in totals.items()]
    if parts or done >= steps:
        return ", ".join(parts) or "done"
    if scored := sum(map(_count_rows, run.list_files(run.reference_parts.name, "parquet"))):
        return f"the reference has scored {scored:,} of {_count_rows(run.pairs):,} sides"
    training = is_written(run.trajectories(POLICY, done)) or is_written(run.datums(POLICY, done))
    return f"step {done + 1} of {steps}{': training' if training else ''}"


def _count_rows(path: Path) -> int:
    return pq.read_metadata(path).num_rows


def _seconds_left(seconds: Sequence[float], steps: int) -> tuple[float, float] | None:
    """Return how long the steps last, by the quartiles of the seconds of the steps before."""
    if not seconds or not steps:
        return None
    low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else [*seconds] * 3
    return low * steps, high * steps
