"""Timing of programs against each other, and the tables of the results."""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Took:
    """Wall seconds of one round, and CPU seconds of all processes that took part.

    CPU seconds hardly change when other programs use the machine too.
    """

    wall: float
    cpu: float


def time_in_turns(
    timed: Mapping[str, Callable[[], object]], rounds: int, servers: Sequence[int] = ()
) -> dict[str, list[Took]]:
    """Time functions in turns (A B A B …), so that a busy machine slows all of them alike.

    Each runs once before its time counts. `servers` are the ids of processes that may take part.
    """
    for run in timed.values():
        run()
    took: dict[str, list[Took]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            wall, cpu = time.perf_counter(), _cpu_seconds(servers)
            run()
            took[name].append(Took(time.perf_counter() - wall, _cpu_seconds(servers) - cpu))
    return took


SPEED = ("", "tokens/s", "range", "ratio", "tokens/CPU-s", "ratio")


def speed_rows(took: Mapping[str, Sequence[Took]], tokens: int, peer: str) -> list[list[str]]:
    """Format rows under SPEED: medians, and their ratios to the peer's speed."""
    walls = {name: [round.wall for round in rounds] for name, rounds in took.items()}
    cpus = {name: [round.cpu for round in rounds] for name, rounds in took.items()}
    return [
        [
            name,
            f"{tokens / median(walls[name]):,.0f}",
            f"{tokens / max(walls[name]):,.0f}-{tokens / min(walls[name]):,.0f}",
            f"{paired_ratio(walls[peer], walls[name]):.2f}",
            f"{tokens / median(cpus[name]):,.0f}",
            f"{paired_ratio(cpus[peer], cpus[name]):.2f}",
        ]
        for name in took
    ]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


COMPARISONS = "RATCHET_COMPARISONS"
"""Environment variable with the file of the lines that `benchmarks.bench` shows."""


@dataclass(frozen=True)
class Comparison:
    """A line of the table of all benchmarks: the seconds of our rounds, and those of a peer.

    The rounds were timed in turns; `theirs` is empty without a peer. With an `amount` of a `unit`
    a round, the table shows speeds in place of seconds. `limit` is a goal or a bound, in words.
    """

    what: str
    ours: Sequence[float]
    peer: str = ""
    theirs: Sequence[float] = ()
    amount: float = 0
    unit: str = ""
    limit: str = ""

    def row(self) -> list[str]:
        """Format the line under COMPARED; a ratio is one of times, so that 0.5 is twice as fast."""
        pairs = zip(self.ours, self.theirs, strict=True) if self.theirs else ()
        ratios = sorted(own / other for own, other in pairs)
        beside = f"{self._show(self.theirs)}, {self.peer}" if ratios else ""
        ratio = f"{median(ratios):.2f}" if ratios else ""
        spread = f"{ratios[0]:.2f}-{ratios[-1]:.2f}" if ratios else ""
        return [self.what, self._show(self.ours), beside, ratio, spread, self.limit]

    def _show(self, seconds: Sequence[float]) -> str:
        took = median(seconds)
        return f"{self.amount / took:,.0f} {self.unit}/s" if self.amount else f"{took:.2f} s"


COMPARED = ("what", "Ratchet", "beside", "ratio of times", "range", "limit")


def note(comparison: Comparison) -> None:
    """Note a line of the table of all benchmarks, if `benchmarks.bench` asks for it."""
    if file := os.environ.get(COMPARISONS):
        with Path(file).open("a", encoding="utf-8") as noted:
            noted.write(json.dumps(asdict(comparison)) + "\n")


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a title and a Markdown table, whose columns of numbers are aligned to the right."""
    columns = ([row[place] for row in rows] for place in range(len(header)))
    rule = ["---:" if all(map(_is_number, cells)) else "---" for cells in columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
    return "\n".join([f"### {title}", "", *lines, ""])


def _is_number(cell: str) -> bool:
    """Return whether a cell is empty, or holds numbers: `1,224-1,226`, `0.7 to 0.9`, `5 s`."""
    return set(re.findall(r"[^\W\d_]+", cell)) <= {"to", "s", "nan"}


def describe_machine() -> str:
    """Describe the machine, the versions, and the load average."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "tinker"))
    return (
        f"Machine: {_processor()}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, {versions}; "
        f"load average {load:.1f} when it began.\n"
    )


def _processor() -> str:
    """Name the processor; family and model say more where a hypervisor hides the name."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    fields = {}
    for line in info.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"


def _cpu_seconds(servers: Sequence[int]) -> float:
    """Return the CPU seconds of this process and of servers.

    Only Linux shows the clock of another process (clock_getcpuclockid(3)); elsewhere NaN.
    """
    own = time.process_time()
    if servers and sys.platform != "linux":
        return float("nan")
    return own + sum(time.clock_gettime((~server << 3) | 2) for server in servers)
