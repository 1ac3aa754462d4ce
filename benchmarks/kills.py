"""Kill training runs at random moments, continue them, and count lost and repeated work.

A try is one run, killed up to `--each` times by SIGKILL: the flow's process (with the door in it),
the engine, or both at once. After each kill a new process continues the run. At the end the run is
compared with an undisturbed run of the same recipe. Results are appended to a file, so a stopped
harness can continue. The exit status is 1 after any failure.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks import aftermath, victims
from benchmarks.measuring import machine, table

VICTIMS = ("flow", "engine", "flow and engine")
STARTING = 0.2
"""Share of kills at a time after the start; the other kills come after some bytes."""
AFTER_SECONDS = 0.5
"""Longest delay of a kill after a write: about the duration of an update, which writes little."""
PATIENCE_SECONDS = 60.0
"""Time within which a flow ends after its engine was killed."""

COUNTS = ("finished_rerun", "applied_twice", "sampled_twice", "replayed", "lost", "rebuilt")
FORBIDDEN = ("finished_rerun", "applied_twice", "sampled_twice")

Line = dict[str, Any]

SHORT = (
    "rollouts.groups=4",
    "rollouts.group_size=4",
    "rollouts.concurrency=8",
    "evaluation.examples=6",
    "evaluation.every=3",
    "checkpoints.every=3",
)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "hello": (*SHORT, "steps=12"),
    "guessing": (
        *SHORT,
        "steps=8",
        "agent=benchmarks.guessing:play",
        "dataset.path=datasets/guess_the_number.jsonl",
        'dataset.columns=["high","guesses","secret"]',
    ),
    "whispers": (  # two policies
        *SHORT,
        "steps=6",
        "agent=whispers",
        "roles.teller=policy",
        "roles.listener=policy:listener",
    ),
}


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run for comparison, and its duration and size."""

    contents: aftermath.Contents
    startup: float
    """Seconds before it writes anything."""
    size: int
    """Bytes that it writes."""


@dataclass(frozen=True)
class Harness:
    """Folders and settings of the harness."""

    folder: Path
    environment: victims.Environment
    seed: int
    each: int
    """Largest number of kills per try."""
    until: float = float("inf")
    """Monotonic time after which no run is killed and the running tries are finished."""
    spread: float = 0.7
    """Share of a run's bytes within which the kills of a try come, on average."""

    @property
    def record(self) -> Path:
        """Append one line per kill, and one per finished try."""
        return self.folder / "kills.jsonl"

    def told(self) -> list[Line]:
        return aftermath.read_json_lines(self.record)

    def tell(self, **line: object) -> None:
        """Append one line in one write, because concurrent tries may share the file."""
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def undisturbed(harness: Harness, name: str, settings: Sequence[str]) -> Undisturbed:
    """Run the recipe once without a kill, or read the result of an earlier harness."""
    run, noted = harness.folder / name, harness.folder / f"{name}.undisturbed.json"
    if not noted.exists():
        training = victims.train(run, settings, harness.environment)
        while not training.written() and not training.ended_within(victims.LOOK_SECONDS):
            pass
        startup = time.time() - training.started
        if training.process.wait():
            raise SystemExit(f"the undisturbed run failed; its log is {victims.log_of(run)}")
        noted.write_text(
            json.dumps({"startup": startup, "size": training.written()}), encoding="utf-8"
        )
    return Undisturbed(aftermath.contents(run), **json.loads(noted.read_text(encoding="utf-8")))


def tried(harness: Harness, name: str, settings: Sequence[str], number: int) -> None:
    """Kill and continue one run until it is done, then compare it."""
    run = harness.folder / f"{name}-{number:03d}"
    if time.monotonic() > harness.until and not run.exists():
        return
    reference = undisturbed(harness, name, settings)
    killed = sum(line["kind"] == "kill" and line["run"] == run.name for line in harness.told())
    while True:
        training = victims.train(run, settings, harness.environment)
        random = Random(f"{harness.seed}/{run.name}/{killed}")
        spared = killed == harness.each or time.monotonic() > harness.until
        if spared or not _killed(harness, training, reference, random):
            break
        killed += 1
    if code := training.process.wait():
        log = victims.log_of(run)
        raise SystemExit(f"{run.name} ended by itself with {code}; its log is {log}")
    harness.tell(
        kind="try",
        workload=name,
        run=run.name,
        kills=killed,
        resumed=bool(killed),
        first_token=aftermath.first_sampled(run, training.started),
        differs=aftermath.differences(aftermath.contents(run), reference.contents),
        **asdict(aftermath.counts(run)),
    )


def _killed(
    harness: Harness, training: victims.Training, reference: Undisturbed, random: Random
) -> bool:
    """Kill the run at a random moment; return False if the run ended before."""
    again, size = training.size > 0, 0.0
    victim, starting = random.choice(VICTIMS), random.random() < STARTING
    if starting:
        delay = random.uniform(0, reference.startup)
    else:
        size = random.uniform(1, 2 * harness.spread * reference.size / harness.each)
        delay = random.uniform(0, AFTER_SECONDS)
    while training.written() < size:
        if training.ended_within(victims.LOOK_SECONDS):
            return False
    if training.ended_within(delay):
        return False
    working = training.written() > 0
    victim = victims.kill(training, victim)
    hung = not training.ended_within(PATIENCE_SECONDS)
    if hung:
        training.process.kill()
        training.process.wait()
    harness.tell(
        kind="kill",
        run=training.run.name,
        victim=victim,
        stage=aftermath.stage(training.run) if working else "starting",
        resumed=again,
        first_token=aftermath.first_sampled(training.run, training.started),
        hung=hung,
        load=os.getloadavg()[0],
    )
    return True


def wanted(harness: Harness, names: Sequence[str], kills: int) -> list[tuple[str, int]]:
    """Return the unfinished tries, alternating workloads, for enough kills."""
    numbered = [(name, number) for number in range(kills) for name in names]
    enough = numbered[: -(-kills // harness.each)]
    done = {line["run"] for line in harness.told() if line["kind"] == "try"}
    return [(name, number) for name, number in enough if f"{name}-{number:03d}" not in done]


def report(lines: Sequence[Line]) -> str:
    """Report kills, counts that must be zero, and seconds until a run samples again."""
    kills = [line for line in lines if line["kind"] == "kill"]
    tries = [line for line in lines if line["kind"] == "try"]
    rows = []
    for name in sorted({line["workload"] for line in tries}):
        ours = [line for line in tries if line["workload"] == name]
        sums = [sum(line[count] for line in ours) for count in COUNTS]
        differing = sum(bool(line["differs"]) for line in ours)
        rows.append([name, *map(str, (len(ours), sum(t["kills"] for t in ours), differing, *sums))])
    header = ("", "runs", "kills", "differ", *(name.replace("_", " ") for name in COUNTS))
    parts = [
        table("Runs that were killed and continued, beside undisturbed ones", header, rows),
        table("Kills, by what the run was doing", *_by_stage(kills)),
        _soon(lines),
    ]
    return "\n".join(parts)


def _by_stage(kills: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    hits = Counter((line["victim"], line["stage"]) for line in kills)
    stages = sorted({stage for _, stage in hits})
    rows = [
        [
            who,
            *(str(hits[who, stage]) for stage in stages),
            str(sum(line["victim"] == who for line in kills)),
        ]
        for who in VICTIMS
    ]
    return ["killed", *stages, "all"], rows


def _soon(lines: Sequence[Line]) -> str:
    """Return the seconds of processes that continued a run and lived to sample."""
    times = sorted(line["first_token"] for line in lines if line["resumed"] and line["first_token"])
    hung = sum(line.get("hung", False) for line in lines)
    if not times:
        return f"No restart sampled anything. Processes that hung: {hung}.\n"
    late = times[int(0.9 * (len(times) - 1))]
    return (
        f"From a restart to its first new sampled token: median {median(times):.1f} s, nine of ten "
        f"within {late:.1f} s, at most {times[-1]:.1f} s ({len(times)} restarts; load average "
        f"{_load(lines)}). Processes that hung: {hung}.\n"
    )


def _load(lines: Sequence[Line]) -> str:
    loads = sorted(line["load"] for line in lines if "load" in line)
    return f"{loads[0]:.0f} to {loads[-1]:.0f}" if loads else "unknown"


def failures(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each failure."""
    hung = [f"{line['run']} hung when it was killed" for line in lines if line.get("hung")]
    differing = [
        f"{line['run']} differs in {line['differs']}" for line in lines if line.get("differs")
    ]
    redone = [
        f"{line['run']}: {count.replace('_', ' ')} = {line[count]}"
        for line in lines
        for count in FORBIDDEN
        if line.get(count)
    ]
    return [*hung, *differing, *redone]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20, help="how many, over all tries")
    options.add_argument("--each", type=int, default=10, help="kills of one run")
    options.add_argument("--minutes", type=float, default=float("inf"), help="kill nobody later")
    options.add_argument("--beside", type=int, default=1, help="tries that run at the same time")
    options.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    options.add_argument(
        "--folder", type=Path, default=Path("runs/kills"), help="goes on if it is there"
    )
    options.add_argument("--api", help="a Prefect server's API; one of its own if left out")
    options.add_argument("--workload", choices=[*WORKLOADS], help="only this one")
    asked = options.parse_args()
    names = [asked.workload] if asked.workload else [*WORKLOADS]
    folder = asked.folder.absolute()
    print(machine(), flush=True)
    with ExitStack() as stack:
        home = folder / "prefect"
        api = asked.api or stack.enter_context(victims.prefect_server(home))
        until = time.monotonic() + 60 * asked.minutes
        harness = Harness(folder, victims.environment(home, api), asked.seed, asked.each, until)
        for name in names:
            undisturbed(harness, name, WORKLOADS[name])
        with ThreadPoolExecutor(asked.beside) as places:
            tries = [
                places.submit(tried, harness, name, WORKLOADS[name], number)
                for name, number in wanted(harness, names, asked.kills)
            ]
            try:
                for ended in as_completed(tries):
                    ended.result()
            finally:
                places.shutdown(cancel_futures=True)
    print(report(harness.told()))
    raise SystemExit("\n".join(failures(harness.told())) or 0)


if __name__ == "__main__":
    main()
