"""The report of a kill harness: its record as tables, and what must not have happened."""

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from benchmarks.interruptions.compare_runs import REPETITIONS
from benchmarks.measuring import format_table

STOPPED = {"flow by SIGINT": signal.SIGINT, "flow by SIGTERM": signal.SIGTERM}
"""Flows that are asked to stop rather than killed → the signal."""
STOPPING_SECONDS = 5.0
"""Time in which a flow has stopped."""
VICTIMS = ("flow", "engine", "flow and engine", *STOPPED)
WORKER = "worker"
"""Victim beside the others where batches are played on a cluster; its flow lives on."""
COUNTS = (*REPETITIONS, "recalled", "lost", "rebuilt")


Line = dict[str, Any]


@dataclass(frozen=True)
class Width:
    """How the rollouts of a run are played: in how many batches, and how many steps ahead."""

    batches: int
    lag: int = 0
    runner: str = "threads"

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a recipe."""
        return tuple(f"rollouts.{name}={value}" for name, value in asdict(self).items())

    @property
    def reference(self) -> "Width":
        """The width of the run that a killed run of this width is compared with."""
        return Width(1, self.lag)

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


def report(lines: Sequence[Line]) -> str:
    """Describe what was killed, what must be zero, and how soon a run samples again."""
    names = [field.name for field in fields(Width)]
    widths = sorted({tuple(line[name] for name in names) for line in lines})
    rows = [_row(lines, Width(*width)) for width in widths]
    counts = (name.replace("_", " ") for name in COUNTS)
    header = (*names, "runs", "kills", "hung", "differ", *counts)
    title = "Runs that were killed and continued, beside uninterrupted runs with one batch"
    kills = [line for line in lines if line["kind"] == "kill"]
    parts = [
        format_table(title, header, rows),
        format_table("Kills, by what the run was doing", *_count_by_stage(kills)),
        _describe_stops(kills),
        _describe_restarts(lines),
    ]
    return "\n".join(parts)


def _row(lines: Sequence[Line], width: Width) -> list[str]:
    """Return the row of a width."""
    ours = [line for line in lines if asdict(width).items() <= line.items()]
    trials = [line for line in ours if line["kind"] == "trial"]
    numbers = (
        len(trials),
        sum(trial["kills"] for trial in trials),
        sum(line.get("hung", False) for line in ours),
        sum(bool(trial["differs"]) for trial in trials),
        *(sum(trial[count] for trial in trials) for count in COUNTS),
    )
    return [*map(str, (*asdict(width).values(), *numbers))]


def _count_by_stage(kills: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    hits = Counter((line["victim"], line["stage"]) for line in kills)
    stages = sorted({stage for _, stage in hits})
    rows = [
        [
            who,
            *(str(hits[who, stage]) for stage in stages),
            str(sum(line["victim"] == who for line in kills)),
        ]
        for who in (*VICTIMS, WORKER)
    ]
    return ["killed", *stages, "all"], rows


def _describe_stops(kills: Sequence[Line]) -> str:
    """Describe how long it took flows to stop that were asked to."""
    times = sorted(line["ending"] for line in kills if line["victim"] in STOPPED)
    if not times:
        return "No flow was asked to stop.\n"
    return (
        f"From a signal to the flow's end: median {median(times):.1f} s, at most {times[-1]:.1f} s "
        f"({len(times)} signals).\n"
    )


def _describe_restarts(lines: Sequence[Line]) -> str:
    """Describe the times of processes that continued a run and lived to sample."""
    ended = [line for line in lines if line["kind"] != "stall"]
    times = sorted(
        line["first_token"] for line in ended if line["resumed"] and line.get("first_token")
    )
    if not times:
        return "No restart sampled anything.\n"
    late = times[int(0.9 * (len(times) - 1))]
    loads = sorted(line["load"] for line in lines if "load" in line)
    return (
        f"From a restart to its first new sampled token: median {median(times):.1f} s, nine of ten "
        f"within {late:.1f} s, at most {times[-1]:.1f} s ({len(times)} restarts; load average "
        f"{loads[0]:.0f} to {loads[-1]:.0f}).\n"
    )


def _right_statuses(line: Line) -> set[int]:
    """Return the statuses that a signal may end a flow with: Python's own until it is set up."""
    number = STOPPED[line["victim"]]
    return {128 + number, -number} if line["stage"] == "starting" else {128 + number}


def list_violations(lines: Sequence[Line]) -> list[str]:
    """List what happened that must not, a sentence each."""
    hung = [f"{line['run']} hung" for line in lines if line.get("hung")]
    differing = [
        f"{line['run']} differs in {line['differs']}" for line in lines if line.get("differs")
    ]
    repeated = [
        f"{line['run']}: {count.replace('_', ' ')} = {line[count]}"
        for line in lines
        for count in REPETITIONS
        if line.get(count)
    ]
    kills = [line for line in lines if line["kind"] == "kill" and line["victim"] in STOPPED]
    late = [
        f"{line['run']} took {line['ending']:.1f} s to stop"
        for line in kills
        if line["ending"] > STOPPING_SECONDS
    ]
    wrong = [
        f"{line['run']} ended with status {line['status']} as {line['victim']}"
        for line in kills
        if line["status"] not in _right_statuses(line)
    ]
    return [*hung, *differing, *repeated, *late, *wrong]
