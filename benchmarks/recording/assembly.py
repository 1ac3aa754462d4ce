"""Spans of rollouts of several turns, sealed and assembled: spans a second, memory and bytes.

    python -m benchmarks.recording.assembly

Each stage runs in a process of its own, whose peak memory is told beside what the process takes
before it begins. The limit of a stage is to read the bytes of its input, and to write its output.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Comparison, describe_machine, format_table, note
from benchmarks.peers.turns import make_turns
from benchmarks.recording.turn_spans import make_span
from ratchet.adapters.player_protocol import RolloutEnd
from ratchet.adapters.rewards import Reward
from ratchet.tasks.recording.journal import Journal, seal
from ratchet.tasks.recording.spans import Span, end_spans
from ratchet.tasks.trajectories import assemble_trajectories

COLUMNS = (
    *("stage", "turns", "spans", "spans/s", "spans/CPU-s", "peak MiB", "of them before"),
    *("MB read", "MB written", "bytes/token"),
)
MEBIBYTE = 2**20


def write_journal(path: Path, rollouts: int, turns: int) -> tuple[int, int]:
    """Write the journal of a batch; return its calls and their tokens."""
    calls = tokens = 0
    with Journal(path) as journal:
        for turn in make_turns(rollouts, turns=turns):
            span: Span = make_span(turn)
            kept = turn.number - 1 if turn.number else None
            journal.append(span | {"kept_call": kept, "kept_how": "messages"})
            calls, tokens = calls + 1, tokens + len(turn.prompt) + len(turn.answer)
            if turn.number == turns - 1:
                end = RolloutEnd(Reward(1.0), 0.0, span["rollout_id"], 0)
                journal.append(end_spans(end, span["ended"])[-1])
    return calls, tokens


def run_stage(stage: str, source: Path, made: Path) -> dict[str, float]:
    """Run a stage here; return its seconds and the peak memory, in all and before."""
    before = _peak()
    wall, cpu = time.perf_counter(), time.process_time()
    if stage == "seal":
        seal(source, made)
    else:
        assemble_trajectories.make(made, [source])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall, "cpu": cpu, "peak": _peak(), "before": before}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEBIBYTE


def measure(folder: Path, spans: int, turns: int) -> list[list[str]]:
    """Measure the stages of a batch of about so many spans."""
    files = [folder / f"{turns}.{suffix}" for suffix in ("jsonl", "spans.parquet", "parquet")]
    calls, tokens = write_journal(files[0], max(1, spans // turns), turns)
    rows = []
    for stage, source, made in zip(("seal", "assemble"), files, files[1:], strict=False):
        module = [sys.executable, "-m", "benchmarks.recording.assembly"]
        command = [*module, "--stage", stage, str(source), str(made)]
        took = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        read, written = (path.stat().st_size for path in (source, made))
        what = f"{stage} spans, {turns} turns a rollout, processor time"
        note(Comparison(what, [took["cpu"]], amount=calls, unit="spans"))
        speeds = [f"{calls / took[clock]:,.0f}" for clock in ("wall", "cpu")]
        peaks = [f"{took[when]:.0f}" for when in ("peak", "before")]
        sizes = [f"{read / 1e6:.1f}", f"{written / 1e6:.1f}", f"{written / tokens:.2f}"]
        rows.append([stage, str(turns), f"{calls:,}", *speeds, *peaks, *sizes])
    return rows


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--spans", type=int, default=50_000, help="of a batch")
    options.add_argument("--turns", type=int, nargs="+", default=[5, 25], help="of a rollout")
    options.add_argument("--stage", nargs=3, help="run one stage here: its name and its two files")
    arguments = options.parse_args()
    if arguments.stage:
        stage, *paths = arguments.stage
        print(json.dumps(run_stage(stage, *map(Path, paths))))
        return
    print(describe_machine())
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            row
            for turns in arguments.turns
            for row in measure(Path(scratch), arguments.spans, turns)
        ]
    print(format_table("Spans that are sealed and become trajectories", COLUMNS, rows))


if __name__ == "__main__":
    main()
