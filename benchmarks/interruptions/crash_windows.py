"""Crashes a run of two steps once at each of its writes, and compares it with an undisturbed run.

Every process of the run dies at the first of its windows (`crash_shim/sitecustomize.py`) that was
not crossed yet, the same command is started again, and so on until the run is done. Windows are
those of the flow's process and of the engine. They are divided among several runs, which go on side
by side. The exit status is 1 if a run differs from its reference, or repeated anything.

The processes are forks of ones that have imported what they need: a run is started hundreds of
times, and its imports would take most of each start.
"""

import argparse
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interruptions import compare_runs, killable_runs
from benchmarks.measuring import describe_machine, format_table
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import CLI, Warm, server

SHIM = Path(__file__).parent / "crash_shim"
SHORT = ("steps=2", "evaluation.examples=1", "evaluation.every=0", "checkpoints.every=1")
SETTINGS = {
    "hello": (
        *SHORT,
        "rollouts.groups=2",
        "rollouts.group_size=2",
        "rollouts.batches=2",
        "rollouts.max_tokens=12",
        "evaluation.greedy=false",
    ),
    "hello-finetune": (*SHORT, "batch.examples=2"),
    "hello-prefer": (*SHORT, "batch.pairs=2"),
}
"""Recipes that are walked, with their settings."""
MODULES = (*CLI, "ratchet.flows.train", "benchmarks.interruptions.warm_imports")
"""Imports of a run."""


def warm_runs(environment: killable_runs.Environment) -> type[Warm]:
    """Start the process of which runs in this environment are forks; return the forks' type."""
    known = {**environment, "PYTHONPATH": str(killable_runs.ROOT)}
    warm = type("WarmRun", (Warm,), {"modules": MODULES, "variables": (*known.items(),)})
    server(warm.modules, warm.variables)
    return warm


@dataclass(frozen=True)
class Walk:
    """A run that crashes at its share of the windows: those of number `part` of `parts`."""

    folder: Path
    environment: killable_runs.Environment
    part: int
    parts: int
    recipe: str = "hello"
    settings: tuple[str, ...] = SETTINGS["hello"]

    @property
    def run(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.folder / f"walk-{self.part}-of-{self.parts}")

    @property
    def crossed(self) -> Path:
        """File of the windows that were crossed, one a line."""
        return self.folder / f"{self.run.name}.windows"

    def windows(self) -> list[str]:
        """List the windows that were crossed."""
        return self.crossed.read_text(encoding="utf-8").splitlines()

    def start(self) -> killable_runs.Training:
        """Start or continue the run."""
        crashing = {
            "PYTHONPATH": str(SHIM),
            "CRASH_RUN": str(self.run.path),
            "CRASH_CROSSED": str(self.crossed),
            "CRASH_SHARE": f"{self.part}/{self.parts}",
        }
        return self.go_on({**self.environment, **crashing})

    def go_on(self, environment: killable_runs.Environment) -> killable_runs.Training:
        """Start or continue the run in an environment."""
        return killable_runs.train(
            self.run, self.settings, environment, self.recipe, popen=warm_runs(self.environment)
        )


def make_reference(
    folder: Path,
    environment: killable_runs.Environment,
    recipe: str = "hello",
    settings: tuple[str, ...] = SETTINGS["hello"],
) -> compare_runs.Contents:
    """Train the run without a crash, or read the one that is there."""
    run = RunFolder(folder / "undisturbed")
    warm_runs(environment)
    killable_runs.train_to_end(run, settings, environment, recipe)
    return compare_runs.read_contents(run)


def walk_windows(walk: Walk, reference: compare_runs.Contents, until: float) -> list[str]:
    """Crash and continue a run until no window is left; return what is wrong with it.

    After `until` (monotonic seconds) the run goes on without crashes.
    """
    walk.crossed.touch()
    while True:
        before = len(walk.windows())
        if time.monotonic() > until:
            code = walk.go_on(walk.environment).exit_code()
        else:
            code = walk.start().exit_code()
        if code == 0:
            break
        if len(walk.windows()) == before:
            return [f"{walk.run.path} ended with code {code} at no window: see its log"]
    faults = compare_runs.list_faults(walk.run, reference)
    return [f"{walk.run.path} {fault}" for fault in faults]


def report(windows: list[str]) -> str:
    """Count the windows that were crossed, by process, call and moment."""
    crossed = Counter(
        ("engine" if name.startswith("engine/") else "flow", call, how)
        for how, call, name in (window.split(" ", 2) for window in windows)
    )
    moments = ("before", "torn", "after")
    rows = [
        (f"{process}, {call}", *(str(crossed[process, call, how]) for how in moments))
        for process in ("flow", "engine")
        for call in ("fsync", "rename")
    ]
    return format_table(f"{crossed.total()} windows were crossed", ("at", *moments), rows)


def main() -> None:
    """Run the walk from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--recipe", choices=SETTINGS, default="hello")
    options.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe")
    options.add_argument("--parallel", type=int, default=3, help="runs among which windows divide")
    options.add_argument("--minutes", type=float, default=float("inf"), help="crash nothing later")
    options.add_argument(
        "--folder", type=Path, default=Path("runs/crash_windows"), help="where the runs are kept"
    )
    arguments = options.parse_args()
    folder, recipe = arguments.folder.absolute(), arguments.recipe
    settings = (*SETTINGS[recipe], *arguments.set)
    print(describe_machine(), flush=True)
    with killable_runs.prefect_server(folder / "prefect") as api:
        environment = killable_runs.environment(folder / "prefect", api)
        reference = make_reference(folder, environment, recipe, settings)
        until = time.monotonic() + 60 * arguments.minutes
        parts = arguments.parallel
        walks = [Walk(folder, environment, part, parts, recipe, settings) for part in range(parts)]
        with ThreadPoolExecutor(parts) as threads:
            wrong = [*threads.map(lambda walk: walk_windows(walk, reference, until), walks)]
    print(report([window for walk in walks for window in walk.windows()]))
    raise SystemExit("\n".join(sentence for of_walk in wrong for sentence in of_walk) or 0)


if __name__ == "__main__":
    main()
