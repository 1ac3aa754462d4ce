"""Seconds from a command to its first request for tokens, beside the start of a bare loop.

Each has a process of its own, and is killed at that request: on one engine that is there already,
where a proxy sees it, or with an engine of its own, where the run's journal has it. So has that of
`ratchet train`, which probes a service first. Commands that only read are timed to their end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.measuring import (
    Comparison,
    describe_machine,
    format_table,
    note,
    paired_ratio,
    time_in_turns,
)
from benchmarks.run_speed import BARE, ROOT, SETTINGS, format_range, make_plan, start_engine
from ratchet.flows.recipe.loading import named_recipe
from tests.support.servers.fault_proxy import FaultProxy, proxied

LIMIT_SECONDS, LOOK_SECONDS = 120.0, 0.002
RUN, STEPS = "resumed", 4
SMALL = [part for setting in (*SETTINGS, f"steps={STEPS}") for part in ("--set", setting)]
COMMANDS: Mapping[str, Sequence[str]] = {
    "train": ["train", "hello", *SMALL],
    "evaluate": ["evaluate", "hello", "--model", "base", *SMALL],
    "resume": ["resume", RUN],
    "serve": ["serve", "local/tiny-chat"],
}
WITH_ENGINE: Mapping[str, Sequence[str]] = {
    "train": COMMANDS["train"],
    "evaluate": COMMANDS["evaluate"],
    "dryrun": ["dryrun", "hello"],
}
"""Commands that start an engine, since no service is named."""
ITS_ENGINE = ", and its engine"
GOAL = "2.2"
READING: Mapping[str, Sequence[str]] = {
    "--help": [],
    "keys": [],
    "runs": [],
    "find": ["you", "--run", RUN],
    "costs": [RUN],
    "report": [RUN],
}
READING_GOAL = "0.4 s"


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="starts of each")
    arguments = options.parse_args()
    print(describe_machine())
    took: dict[str, list[float]] = {name: [] for name in (BARE, *COMMANDS)}
    alone: dict[str, list[float]] = {name: [] for name in (BARE, *WITH_ENGINE)}
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_engine(Path(scratch) / "state") as engine,
        proxied(engine["TINKER_BASE_URL"]) as proxy,
    ):
        folder = Path(scratch)
        places = {"RATCHET_RUNS": f"{folder}/runs", "PREFECT_HOME": f"{folder}/prefect"}
        variables = {**engine, **places, "TINKER_BASE_URL": proxy.url}
        ratchet = ["-m", "ratchet.flows.cli.main"]
        start = partial(time_first_call, proxy, variables)
        start([*ratchet, *COMMANDS["train"]])  # which makes Prefect's database
        cut_off([*ratchet, *COMMANDS["train"], "--run", RUN], variables, folder / "runs" / RUN)
        for number in range(arguments.rounds):
            own = folder / f"round-{number}"
            took[BARE].append(start(bare_loop(folder)))
            new = {**variables, "RATCHET_RUNS": f"{own}"}
            took["train"].append(time_first_record([*ratchet, *COMMANDS["train"]], new))
            for name in ("evaluate", "resume", "serve"):
                words = [*ratchet, *COMMANDS[name]]
                took[name].append(start(words, asking=name == "serve"))
            alone[BARE].append(time_engine_and_loop(own / "bare"))
            for name, words in WITH_ENGINE.items():
                runs = {**places, "RATCHET_RUNS": f"{own / words[0]}"}
                alone[name].append(time_first_record([*ratchet, *words], runs))
        table = time_reading([sys.executable, *ratchet], variables, arguments.rounds)
    rows = [*compare(took), *compare(alone, ITS_ENGINE)]
    print(format_table("Seconds to the first request for tokens", ("", "s", "ratio"), rows))
    print(table)


def time_reading(ratchet: Sequence[str], variables: Mapping[str, str], rounds: int) -> str:
    """Time the commands that only read; return the table."""
    how: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **variables}, "check": True}
    how["stdout"] = subprocess.DEVNULL
    commands = {name: [*ratchet, name, *words] for name, words in READING.items()}
    timed = {name: partial(subprocess.run, command, **how) for name, command in commands.items()}
    rows = []
    for name, took in time_in_turns(timed, rounds).items():
        walls = [one.wall for one in took]
        rows.append([f"ratchet {name}", format_range(walls)])
        note(Comparison(f"`ratchet {name}`", walls, limit=READING_GOAL))
    return format_table("Seconds of commands that only read", ("", "s"), rows)


def compare(took: Mapping[str, Sequence[float]], more: str = "") -> Iterator[list[str]]:
    """Yield a row of each command, beside the first of all, which is a bare loop; note it, too.

    `more` says what they all start.
    """
    (peer, theirs), *commands = took.items()
    yield [f"{peer}{more}", format_range(theirs), ""]
    for name, ours in commands:
        yield [f"ratchet {name}{more}", format_range(ours), f"{paired_ratio(ours, theirs):.2f}"]
        beside = f"{peer}{more}"
        note(Comparison(f"start of `ratchet {name}`{more}", ours, beside, theirs, limit=GOAL))


def bare_loop(folder: Path) -> list[str]:
    """Return the arguments of a bare loop by the recipe of `ratchet train hello`."""
    plan = folder / "plan.json"
    recipe = named_recipe("hello", SMALL[1::2])
    plan.write_text(json.dumps({**make_plan(recipe), "by_client": False}), encoding="utf-8")
    return ["-m", "benchmarks.peers.bare_loop", str(plan), str(folder / "report.json")]


def time_first_call(
    proxy: FaultProxy, variables: Mapping[str, str], words: Sequence[str], *, asking: bool = False
) -> float:
    """Return the seconds from a program's start to the first request for tokens; kill it."""
    proxy.script()
    began = time.monotonic()
    with running(words, variables) as process:
        if asking:
            ask_once(process)
        wait_until(lambda: bool(proxy.seen["asample"]), process)
        return time.monotonic() - began


def time_engine_and_loop(folder: Path) -> float:
    """Return the seconds from an engine's start to a bare loop's first request for tokens."""
    began = time.monotonic()
    with start_engine(folder / "state") as engine, proxied(engine["TINKER_BASE_URL"]) as proxy:
        ready = time.monotonic() - began
        variables = {**engine, "TINKER_BASE_URL": proxy.url}
        return ready + time_first_call(proxy, variables, bare_loop(folder))


def time_first_record(words: Sequence[str], variables: Mapping[str, str]) -> float:
    """Return the seconds from a command's start to the first call in a journal; kill it."""
    began, runs = time.monotonic(), Path(variables["RATCHET_RUNS"])
    with running(words, variables) as process:
        wait_until(lambda: any(map(Path.read_bytes, runs.glob("**/journal/*.jsonl"))), process)
        return time.monotonic() - began


def ask_once(process: subprocess.Popen[str]) -> None:
    """Ask the model that a program serves, by the variables that it prints."""
    assert process.stdout is not None
    lines = (process.stdout.readline().removeprefix("export ") for _ in range(3))
    said = dict(line.strip().split("=", 1) for line in lines)
    with OpenAI(base_url=said["OPENAI_BASE_URL"], api_key=said["OPENAI_API_KEY"]) as client:
        client.chat.completions.create(
            model=said["OPENAI_MODEL"], messages=[{"role": "user", "content": "Who are you?"}]
        )


def cut_off(words: Sequence[str], variables: Mapping[str, str], run: Path) -> None:
    """Kill a training after its first step."""
    metrics = run / "metrics.jsonl"
    with running(words, variables) as process:
        wait_until(lambda: metrics.exists() and bool(metrics.read_bytes()), process)


@contextmanager
def running(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process group of its own, which is killed at the end."""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds; SystemExit if the program ends or takes too long."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args} asks for no tokens")
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
