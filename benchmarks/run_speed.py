"""Wall time of a training run: `ratchet train hello` beside bare loops over the Tinker SDK.

One loop samples by the SDK; in the other one the agent itself asks, by its own client, over HTTP.
All train the same steps with the same prompts and seeds, in turns. Each has a process of its own
and a new engine.
"""

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is this repository's
os.environ.setdefault("TINKER_TELEMETRY", "0")

from transformers import AutoTokenizer

from benchmarks.measuring import Comparison, describe_machine, format_table, note, paired_ratio
from benchmarks.timelines import (
    PAUSES,
    Timeline,
    begin_of_step,
    read_bare_timeline,
    read_pauses,
    read_run_timeline,
    rollout_times,
)
from ratchet.adapters.calls import POLICY, CallId
from ratchet.adapters.project.modules import load_agent_file
from ratchet.adapters.rendering.chat import Chat
from ratchet.engine.model.base_models import find
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.examples.shards import choose_examples
from ratchet.tasks.storage.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
PROBE = ROOT / "benchmarks" / "pause_probe"
LONG_PAUSE = 0.05
MOST_TABLES = 4
"""Tables of Prefect's database that are named."""
RUN = "measured"
hello = load_agent_file("hello")
SETTINGS = ("evaluation.examples=1", "evaluation.greedy=false")
"""The least evaluation that is possible, since the bare loop has none."""

PARTS: Mapping[str, Callable[[Timeline], Sequence[float]]] = {
    "a step": lambda run: run.steps,
    "- rollouts": lambda run: run.rollouts,
    "- training, saving": lambda run: run.training,
    "- between them": lambda run: run.between,
    "start to first call": lambda run: [run.startup],
    "start to end": lambda run: [run.whole],
    "CPU, all processes": lambda run: [run.cpu],
}


OURS, BARE, BY_CLIENT = "ratchet train", "bare loop", "bare loop, the agent's client"
GOALS = {
    "a step": ("a step of hello", {BARE: "1.7", BY_CLIENT: "1.25"}),
    "- between them": ("between two steps of hello", {BARE: "0.12 s"}),
    "CPU, all processes": ("hello, processor time of all processes", {BARE: "", BY_CLIENT: ""}),
}
"""Part → what the table of all benchmarks calls it, and for each loop the goal of the ratio to it,
or of our time."""

Round = Mapping[str, Timeline]
"""Timelines of one round by program: OURS, BARE and BY_CLIENT."""


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="runs of each")
    options.add_argument("--steps", type=int, default=8, help="of each run")
    arguments = options.parse_args()
    settings = [f"steps={arguments.steps}", *SETTINGS]
    recipe = named_recipe("hello", settings)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as scratch:
        plans = {
            name: {**make_plan(recipe), "by_client": name == BY_CLIENT}
            for name in (BARE, BY_CLIENT)
        }
        folders = [Path(scratch) / f"round-{number}" for number in range(arguments.rounds)]
        print(report([time_round(folder, settings, plans) for folder in folders], recipe))
        last = Path(scratch) / f"round-{arguments.rounds - 1}"
        print(report_waits(RunFolder(last / RUN)))
        print(report_pauses(last, arguments.steps))
        runs = [RunFolder(folder / RUN) for folder in Path(scratch).glob("round-*")]
        print(report_left(runs, Path(scratch) / "prefect" / "prefect.db", arguments.steps))


def time_round(
    folder: Path, settings: Sequence[str], plans: Mapping[str, Mapping[str, Any]]
) -> Round:
    """Time `ratchet train`, and then a bare loop by each plan."""
    engine = folder / "engine-of-ratchet"
    took = {OURS: time_on_engine(engine, partial(run_ratchet, folder, settings))}
    for number, (name, plan) in enumerate(plans.items()):
        written, report = folder / f"plan-{number}.json", folder / f"bare-{number}.json"
        written.write_text(json.dumps(plan), encoding="utf-8")
        engine = folder / f"engine-of-bare-loop-{number}"
        took[name] = time_on_engine(engine, partial(run_bare_loop, written, report))
    return took


def make_plan(recipe: Recipe) -> dict[str, Any]:
    """Make the bare loop's plan: prompts, seeds and settings of a recipe of the agent hello."""
    tokenizer = AutoTokenizer.from_pretrained(find(recipe.model.base).folder)
    chat = Chat(tokenizer, recipe.model.renderer, thinking=recipe.model.thinking)
    sampling, examples = recipe.rollouts.sampling(), recipe.train_split().examples()
    shards = [
        choose_examples(examples, recipe.seed, step, recipe.rollouts.groups)
        for step in range(recipe.steps)
    ]
    return {
        "lora": {
            "base_model": recipe.model.base,
            "rank": recipe.model.lora_rank,
            "seed": recipe.seed,
        },
        "adam": recipe.update_method().request(0, []).optimizer.model_dump(),
        "loss": recipe.algorithm.loss,
        "save_every": recipe.checkpoints.every,
        "sampling": {**asdict(sampling), "stop": chat.stop_tokens},
        "steps": [
            [
                _plan_group(chat, row["example"]["identity"], f"train-{step:05d}-{at:04d}", recipe)
                for at, row in enumerate(shard)
            ]
            for step, shard in enumerate(shards)
        ],
    }


def _plan_group(chat: Chat, identity: str, name: str, recipe: Recipe) -> dict[str, Any]:
    """Plan a prompt, and the seed of each of its rollouts as the door derives it."""
    places = (
        CallId(f"{name}-{index:02d}", 0, POLICY, 0) for index in range(recipe.rollouts.group_size)
    )
    return {
        "name": name,
        "identity": identity,
        "prompt": chat.render([{"role": "user", "content": hello.question(identity)}], []),
        "seeds": [place.seed(recipe.seed) for place in places],
    }


@contextmanager
def start_engine(state: Path) -> Iterator[dict[str, str]]:
    """Start a new engine; yield the environment variables of its clients."""
    command = [sys.executable, "-m", "ratchet.engine", "--state", str(state), "--exit-with-stdin"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **probed(state.parent)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            exports = [process.stdout.readline().removeprefix("export ") for _ in range(2)]
            yield dict(line.strip().split("=", 1) for line in exports)
        finally:
            process.stdin.close()


def time_on_engine(state: Path, run: Callable[[dict[str, str]], Timeline]) -> Timeline:
    """Time a run on a new engine, with the CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with start_engine(state) as service:
        timeline = run(service)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return replace(timeline, cpu=cpu)


def run_ratchet(folder: Path, settings: Sequence[str], service: dict[str, str]) -> Timeline:
    """Run `ratchet train`. The rounds share Prefect's database, which the first makes."""
    where = {"RATCHET_RUNS": str(folder), "PREFECT_HOME": str(folder.parent / "prefect")}
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = ["ratchet.flows.cli.main", "train", "hello", "--run", RUN, *overrides]
    variables = {**service, **where, **probed(folder)}
    return read_run_timeline(RunFolder(folder / RUN), *run_module(command, variables))


def probed(folder: Path) -> dict[str, str]:
    """Return the variables of processes that write their pauses into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"PYTHONPATH": str(PROBE), "PAUSES_FILE": str(folder / PAUSES)}


def run_bare_loop(plan: Path, report: Path, service: dict[str, str]) -> Timeline:
    """Run the bare loop."""
    command = ["benchmarks.peers.bare_loop", str(plan), str(report)]
    return read_bare_timeline(report, *run_module(command, service))


def run_module(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run a module to its end; return its start (Unix time) and the seconds it took."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return started, time.time() - started


def report(rounds: Sequence[Round], recipe: Recipe) -> str:
    """Format the table of all parts; a ratio is the median of the rounds' own ratios."""
    rollouts = f"{recipe.rollouts.groups} x {recipe.rollouts.group_size}"
    same = all(run.rewards == of[OURS].rewards for of in rounds for run in of.values())
    rows = []
    for what, part in PARTS.items():
        took = {name: [median(part(of[name])) for of in rounds] for name in rounds[0]}
        ours = took.pop(OURS)
        beside = [
            cell
            for theirs in took.values()
            for cell in (format_range(theirs), f"{paired_ratio(ours, theirs):.2f}")
        ]
        rows.append([what, format_range(ours), *beside])
        called, goals = GOALS.get(what, ("", {}))
        for peer, goal in goals.items():
            note(Comparison(called, ours, peer, took[peer], limit=goal))
    title = (
        f"hello, {recipe.steps} steps of {rollouts} rollouts, {len(rounds)} runs of each: seconds"
    )
    header = ("", OURS, *(cell for name in (BARE, BY_CLIENT) for cell in (name, "ratio")))
    compared = "The same rewards at every step." if same else "The rewards DIFFER."
    return f"{format_table(title, header, rows)}\n{compared}\n"


def report_pauses(folder: Path, steps: int) -> str:
    """Format the table of the pauses of each process of `ratchet train`, without its first step."""
    run = RunFolder(folder / RUN)
    rows = []
    for name, pauses in read_pauses(folder / PAUSES, begin_of_step(run, 1)).items():
        longest = max(pauses, key=lambda pause: pause.seconds)
        note(Comparison(f"longest pause: {name}, hello", [longest.seconds], limit="0.05 s"))
        rows.append(
            [
                name,
                f"{longest.seconds:.3f}",
                f"{max(pause.collecting for pause in pauses):.3f}",
                f"{sum(pause.seconds >= LONG_PAUSE for pause in pauses) / (steps - 1):.1f}",
                f"{pauses[0].memory / 2**20:,.0f}",
                f"{pauses[-1].memory / 2**20:,.0f}",
            ]
        )
    names = (
        "process",
        "longest, s",
        "of it collecting",
        "a step above 0.05 s",
        "MiB",
        "at the end",
    )
    title = f"Pauses of an interpreter in steps 2 to {steps}; a long one is {LONG_PAUSE} s"
    return format_table(title, names, rows)


def report_left(runs: Sequence[RunFolder], database: Path, steps: int) -> str:
    """Format the table of what a step leaves: files, and rows of Prefect's database."""
    rows = []
    for name, place in {"the run": ".", "the engine": "../engine-of-ratchet"}.items():
        sizes = [file.stat().st_size for run in runs for file in (run.path / place).glob("**/*")]
        rows.append([f"files of {name}", *_a_step([len(sizes), sum(sizes) / 1000], runs, steps)])
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("analyze")
        counts = (
            "select tbl, max(cast(stat as integer)) from sqlite_stat1 group by 1 order by 2 desc"
        )
        counted = connection.execute(counts).fetchall()
    for name, count in counted[:MOST_TABLES]:
        rows.append([f"rows of {name}", *_a_step([count], runs, steps), ""])
    whole = [sum(count for _, count in counted), database.stat().st_size / 1000]
    rows.append(["rows of Prefect's database", *_a_step(whole, runs, steps)])
    return format_table("What a step of `ratchet train` leaves", ("", "a step", "kB"), rows)


def _a_step(values: Sequence[float], runs: Sequence[RunFolder], steps: int) -> list[str]:
    return [f"{value / len(runs) / steps:,.1f}" for value in values]


def format_range(times: Sequence[float]) -> str:
    """Format the median and the range."""
    return f"{median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


def report_waits(run: RunFolder) -> str:
    """Format the table of what a rollout waits for."""
    names = ("to the door", "at the door: rendering, sampling", "journal, and back to the agent")
    times = zip(names, rollout_times(run), strict=True)
    rows = [[name, f"{seconds:.3f}"] for name, seconds in times]
    return format_table("A rollout's seconds in `ratchet train`, medians", ("", "s"), rows)


if __name__ == "__main__":
    main()
