"""Stops `train`, `evaluate` and `dryrun` by signals at random moments, and measures how they end.

Ctrl-C reaches the command's whole process group, SIGTERM the command alone. Prefect's server is the
embedded one. A training and an evaluation are started again until they are done, and compared with
those that nothing has stopped. The exit status is 1 if a command took longer than five seconds to
stop, ended with another status, printed anything but one line below the last state of its progress
bar, left a process, or ended otherwise.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import psutil

from benchmarks.interruptions import compare_runs, killable_runs
from benchmarks.interruptions.kill_report import STOPPING_SECONDS
from benchmarks.interruptions.workloads import WORKLOADS
from benchmarks.measuring import describe_machine, format_table
from ratchet.tasks.storage.run_folder import RunFolder

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGING_SECONDS = 60.0
ORPHAN_SECONDS = 30.0
"""Time in which the children of a command that has ended are gone."""

PROGRESS = ("training ", "step ")

SHARE = 0.4
"""Share of a training's time in which it is stopped: each start goes on with what is done."""

TRAINING = WORKLOADS["hello"]
EVALUATION = ("evaluation.examples=48",)
DRYRUN = ("--examples", "8")


@dataclass(frozen=True)
class Ending:
    """End of a command by a signal: after how many seconds it came, and how long the end took."""

    command: str
    number: signal.Signals
    after: float
    seconds: float
    status: int
    said: Sequence[str]
    orphans: int

    def faults(self) -> list[str]:
        """List what is wrong with it, a sentence each."""
        name = f"{self.command}, {self.number.name} after {self.after:.1f} s"
        others = [line for line in self.said if not line.startswith(PROGRESS)]
        one_line = len(others) == 1 and others[0].startswith("ratchet: stopped")
        found = {
            f"took {self.seconds:.1f} s to stop": self.seconds > STOPPING_SECONDS,
            f"ended with status {self.status}": self.status != 128 + self.number,
            f"said {[*self.said]}": not one_line,
            f"left {self.orphans} processes": self.orphans > 0,
        }
        return [f"{name}: {fault}" for fault, wrong in found.items() if wrong]


@dataclass(frozen=True)
class Commands:
    """Commands in a folder of runs, and the source of the moments at which they are stopped."""

    folder: Path
    random: Random

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command in a process group of its own."""
        environment = killable_runs.environment(self.folder / "prefect", api="")
        del environment["PREFECT_API_URL"]  # Prefect starts its embedded server
        return subprocess.Popen(
            [sys.executable, "-m", "ratchet.flows.cli.main", *words],
            cwd=killable_runs.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("w"),
            text=True,
            env={**environment, "RATCHET_RUNS": str(self.folder)},
            process_group=0,
        )

    def finish(self, words: Sequence[str]) -> tuple[str, float]:
        """Run a command that nothing stops; return what it prints, and its seconds."""
        began = time.monotonic()
        with self.start(words) as process:
            said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{words} failed: {self.said()}")
        return said, time.monotonic() - began

    def stop(self, words: Sequence[str], number: signal.Signals, after: float) -> Ending | None:
        """Stop a command some seconds after Python has started; None if it has ended by then."""
        with self.start(words) as process:
            while process.poll() is None and not _catches(process.pid, signal.SIGTERM):
                time.sleep(0.01)
            time.sleep(after)
            if process.poll() is not None or not _catches(process.pid, signal.SIGTERM):
                return None  # it has ended, or its interpreter is ending
            began = time.monotonic()
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            try:
                process.wait(HANGING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            seconds = time.monotonic() - began
        _, orphans = psutil.wait_procs(self._processes(), timeout=ORPHAN_SECONDS)
        status = process.returncode
        return Ending(words[0], number, after, seconds, status, self.said(), len(orphans))

    def _processes(self) -> list[psutil.Process]:
        """List the processes whose environment names the folder, which all children inherit."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("RATCHET_RUNS") == str(self.folder):
                    found.append(process)
        return found

    def said(self) -> list[str]:
        """Return what the last command has printed on stderr."""
        return (self.folder / "stderr").read_text(encoding="utf-8").splitlines()

    def stop_often(self, words: Sequence[str], seconds: float, times: int) -> list[Ending]:
        """Stop a command, which takes `seconds` to its end, at random moments, by turns of signals.

        It ends earlier if a start reaches its end.
        """
        endings = []
        for turn in range(times):
            after = self.random.uniform(0, seconds)
            if (ended := self.stop(words, SIGNALS[turn % 2], after)) is None:
                break
            endings.append(ended)
        return endings


def _catches(process: int, number: signal.Signals) -> bool:
    """Tell whether a process has a handler of a signal."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def train_words(run: str) -> list[str]:
    """Return the command that trains a run or goes on with it."""
    settings = [word for setting in TRAINING for word in ("--set", setting)]
    return ["train", "hello", "--run", run, "--if-exists", "resume", *settings]


def evaluate_words(run: str) -> list[str]:
    """Return the command that evaluates a run."""
    settings = [word for setting in EVALUATION for word in ("--set", setting)]
    return ["evaluate", "hello", "--run", run, *settings]


def stop_commands(commands: Commands, times: int) -> tuple[list[Ending], list[str]]:
    """Stop each command so many times; return the endings, and what is wrong with them."""
    reference, stopped = (RunFolder(commands.folder / name) for name in ("reference", "stopped"))
    _, training = commands.finish(train_words("reference"))
    endings = commands.stop_often(train_words("stopped"), training * SHARE, times)
    commands.finish(train_words("stopped"))
    faults = compare_runs.list_faults(stopped, compare_runs.read_contents(reference))

    expected, evaluating = commands.finish(evaluate_words("reference"))
    endings += commands.stop_often(evaluate_words("stopped"), evaluating, times)
    found, _ = commands.finish(evaluate_words("stopped"))
    if _scores(found) != _scores(expected):
        faults.append(f"an evaluation that was stopped prints {found}, another one {expected}")

    _, trying = commands.finish(["dryrun", "hello", *DRYRUN])
    for _ in range(times):
        endings += commands.stop_often(["dryrun", "hello", *DRYRUN], trying, 1)
    left = [*(commands.folder / "dryruns").glob("*")]
    print(f"{len(left)} dry runs had to be killed, and left their folders")
    return endings, [*faults, *(fault for ending in endings for fault in ending.faults())]


def _scores(printed: str) -> list[str]:
    """Return the table of what an evaluation has printed, without the paths below."""
    return printed.partition("\nnumbers ")[0].splitlines()


def report(endings: Sequence[Ending]) -> str:
    """Return a line for each command."""
    rows = []
    for command in dict.fromkeys(ending.command for ending in endings):
        times = sorted(ending.seconds for ending in endings if ending.command == command)
        said = [f"{len(times)}", f"{median(times):.1f} s", f"{times[-1]:.1f} s"]
        rows.append((command, *said))
    header = ("stopped", "times", "median until its end", "longest")
    return format_table("Commands that were stopped at random moments", header, rows)


def main() -> None:
    """Run it from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=7, help="signals to each command")
    options.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options.add_argument("--folder", type=Path, default=Path("runs/signals"))
    arguments = options.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(describe_machine(), flush=True)
    endings, faults = stop_commands(Commands(folder, Random(arguments.seed)), arguments.times)
    print(report(endings))
    raise SystemExit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
