"""Things to time against each other → tables that name the machine they were measured on."""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Took:
    """Seconds of one round: on the wall, and of processors in all processes that took part.

    The second hardly changes when other programs want the machine too.
    """

    wall: float
    cpu: float


def alternated(
    timed: Mapping[str, Callable[[], object]], rounds: int, server: int | None = None
) -> dict[str, list[Took]]:
    """Each in turn (A B A B …), so that a busy machine slows all of them alike.

    Each runs once before the clock does. `server` is a process that may take part.
    """
    for run in timed.values():
        run()
    took: dict[str, list[Took]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            wall, cpu = time.perf_counter(), _cpu_seconds(server)
            run()
            took[name].append(Took(time.perf_counter() - wall, _cpu_seconds(server) - cpu))
    return took


SPEED = ("", "tokens/s", "range", "ratio", "tokens/CPU-s", "ratio")


def speed_rows(took: Mapping[str, Sequence[Took]], tokens: int, peer: str) -> list[list[str]]:
    """Rows under SPEED: medians, and how many times the peer's speed that is."""
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
    """The median of the rounds' own ratios."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown: a title and a table, all but whose first column is numbers."""
    rule = ["---", *("---:" for _ in header[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
    return "\n".join([f"### {title}", "", *lines, ""])


def machine() -> str:
    """What the numbers depend on, and how busy it was."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "tinker"))
    return (
        f"Machine: {_processor()}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, {versions}; "
        f"load average {load:.1f} when it began.\n"
    )


def _processor() -> str:
    """The processor by its name; family and model say more where a hypervisor hides that."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    fields = {}
    for line in info.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"


def _cpu_seconds(server: int | None) -> float:
    """Of this process and of another one, whose clock only Linux shows (clock_getcpuclockid(3))."""
    own = time.process_time()
    if server is None:
        return own
    if sys.platform != "linux":
        return float("nan")
    return own + time.clock_gettime((~server << 3) | 2)
