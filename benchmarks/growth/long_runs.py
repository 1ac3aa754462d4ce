"""Cost of a step late in a run beside its cost early: seconds and CPU of all processes.

    python -m benchmarks.growth.long_runs --recorded 20 10000

trains some steps of a recipe, makes for each number a run folder that has recorded so many
steps, and measures the steps that follow. What a long run costs Prefect's server is seen only in
a run that has really trained its steps: `--recorded 0 --steps 1200`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is this repository's
os.environ.setdefault("TINKER_TELEMETRY", "0")

import psutil
from safetensors.torch import load_file, save_file

from benchmarks.measuring import Comparison, describe_machine, format_table, note
from ratchet.adapters.calls import POLICY
from ratchet.durable.files import link_or_copy, sealed, sha256_of, unsealed
from ratchet.flows.recipe.loading import changed_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.settings.run import Checkpoints
from ratchet.tasks.storage.files import read_json, write_json
from ratchet.tasks.storage.logs import line_of
from ratchet.tasks.storage.run_folder import RunFolder

ROOT = Path(__file__).parent.parent.parent
BEGUN = 20
"""Steps that are trained, and repeated as the recorded steps of a longer run."""
NUMBER = re.compile(r"\d{5}")
"""Step, or checkpoint, in the name of a file."""
PROGRAMS = ("flow", "engine", "server")
LOOK_SECONDS = 0.01
WARM = 5
"""Steps after a start that are not measured."""


@dataclass
class Measured:
    """When each step of a run ended, and the CPU seconds of each program up to then."""

    ended: list[float] = field(default_factory=list)
    cpu: list[Mapping[str, float]] = field(default_factory=list)

    def seconds(self, steps: slice) -> float:
        """Return the median seconds of a step."""
        return median(after - before for before, after in pairwise(self.ended[steps]))

    def cpu_of_steps(self, steps: slice, program: str) -> list[float]:
        """Return the CPU seconds of each step in a program."""
        cpu = [taken.get(program, 0.0) for taken in self.cpu[steps]]
        return [after - before for before, after in pairwise(cpu)]

    def cpu_seconds(self, steps: slice, program: str) -> str:
        """Format the mean and the median CPU seconds of a step in a program.

        The pages of Prefect's UI are made at a few steps, and are in the mean alone.
        """
        of_steps = self.cpu_of_steps(steps, program)
        return f"{fmean(of_steps):.3f} ({median(of_steps):.2f})"


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--recipe", default="hello-finetune")
    options.add_argument("--recorded", type=int, nargs="+", default=[BEGUN, 10_000])
    options.add_argument("--steps", type=int, default=60, help="measured behind the recorded")
    options.add_argument("--window", type=int, default=40, help="steps of a row")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--set", action="append", default=[], help="of the recipe")
    options.add_argument("--folder", type=Path, help="of the runs; kept")
    arguments = options.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        begun = RunFolder(folder / "begun")
        if any(arguments.recorded) and not begun.exists():
            train(begun, arguments.recipe, BEGUN, arguments.set)
        rows, flow = [], dict[int, list[float]]()
        for _ in range(arguments.rounds):
            for recorded in arguments.recorded:
                run = RunFolder(folder / f"long-{recorded}")
                shutil.rmtree(run.path, ignore_errors=True)
                if recorded:
                    lengthen(begun, run, recorded, recorded + arguments.steps)
                found = train(run, arguments.recipe, recorded + arguments.steps, arguments.set)
                rows += describe(found, recorded, arguments.window)
                of_steps = found.cpu_of_steps(slice(WARM, None), PROGRAMS[0])
                flow.setdefault(recorded, []).append(fmean(of_steps))
                size = sum(f.stat().st_size for f in run.engine.rglob("*") if f.is_file())
                print(f"{run.path}: {size / 2**20:.0f} MiB of the engine", flush=True)
    first, last = min(flow), max(flow)
    what = f"{arguments.recipe}: processor time of a step behind {last:,}"
    note(Comparison(what, flow[last], f"behind {first:,}", flow[first], limit="1.05"))
    header = ("steps", "s", *(f"CPU {program}" for program in PROGRAMS))
    print(format_table("A step; CPU seconds: mean (median)", header, rows))


def describe(found: Measured, recorded: int, window: int) -> list[list[str]]:
    """Describe the first and the last steps of a measured run, if they are not the same."""
    first = slice(WARM, WARM + window + 1)
    rows = []
    for steps in dict.fromkeys([first.start, max(first.start, len(found.ended) - window - 1)]):
        part = slice(steps, steps + window + 1)
        cpu = [found.cpu_seconds(part, name) for name in PROGRAMS]
        last = recorded + min(part.stop, len(found.ended))
        rows.append([f"{recorded + steps} to {last}", f"{found.seconds(part):.3f}", *cpu])
    return rows


def train(run: RunFolder, recipe: str, steps: int, settings: Sequence[str]) -> Measured:
    """Train a run to its end, in processes of its own, and measure them."""
    given = [] if recipe == "hello" else ["epochs=0"]
    values = [f"steps={steps}", *given, *settings]
    overrides = [part for value in values for part in ("--set", value)]
    command = ["resume", run.name] if run.exists() else ["train", recipe, *overrides]
    named = [] if run.exists() else ["--run", run.name]
    run.path.parent.mkdir(parents=True, exist_ok=True)
    variables = {"RATCHET_RUNS": str(run.path.parent), "PREFECT_HOME": f"{run.path}.prefect"}
    with (
        Path(f"{run.path}.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "ratchet.flows.cli.main", *command, *named],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        found = measure(run, process)
    if process.returncode:
        raise SystemExit(f"{run.path} failed; see {run.path}.log")
    return found


def measure(run: RunFolder, process: "subprocess.Popen[bytes]") -> Measured:
    """Note when each step ends, and what each program has taken, until the process ends."""
    found, size = Measured(), run.metrics.stat().st_size if run.metrics.exists() else 0
    while process.poll() is None:
        with suppress(FileNotFoundError), run.metrics.open("rb") as file:
            file.seek(size)
            added = file.read()
            size += len(added)
            for _ in range(added.count(b"\n")):
                found.ended.append(time.monotonic())
                found.cpu.append(cpu_of(process.pid))
        time.sleep(LOOK_SECONDS)
    return found


def cpu_of(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a run's programs so far."""
    taken: dict[str, float] = {}
    with suppress(psutil.NoSuchProcess):
        flow = psutil.Process(pid)
        for one in (flow, *flow.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = " ".join(one.cmdline())
                name = "flow" if one == flow else "engine" if "engine" in words else "server"
                times = one.cpu_times()
                taken[name] = taken.get(name, 0.0) + times.user + times.system
    return taken


def lengthen(begun: RunFolder, run: RunFolder, recorded: int, steps: int) -> None:
    """Make a run that has recorded many steps, as if a trained one had gone on as it began."""
    shutil.copytree(begun.path, run.path, ignore=shutil.ignore_patterns("report.html", "lock"))
    manifest = read_json(begun.manifest)
    recipe = changed_recipe(manifest["recipe"], [f"steps={steps}"], RunRecipe)
    values, fingerprint = recipe.model_dump(mode="json"), recipe.fingerprint()
    write_json(run.manifest, {**manifest, "recipe": values, "fingerprint": fingerprint})
    for path in begun.files():
        numbered = NUMBER.search(path.name)
        for step in range(int(numbered[0]), recorded, BEGUN) if numbered else ():
            name = NUMBER.sub(f"{step:05d}", path.name, count=1)
            if step >= BEGUN and not (target := run.path / path.parent.name / name).exists():
                link_or_copy(path, target)
    rows = read_metrics(begun.metrics)
    with run.metrics.open("ab") as file:
        for step in range(BEGUN, recorded):
            file.write(line_of(rows[step % BEGUN] | {"step": step}))
    repeat_checkpoints(run, recipe.checkpoints, recorded)


def repeat_checkpoints(run: RunFolder, checkpoints: Checkpoints, recorded: int) -> None:
    """Give a run's ledger and engine the checkpoints up to a step, with the weights of BEGUN."""
    last = Ledger(run.checkpoints(POLICY)).at(BEGUN)
    assert last.state is not None
    with run.checkpoints(POLICY).open("ab") as file:
        for step in range(BEGUN + 1, recorded + 1):
            file.write(line_of({"step": step, "phase": "intent", "epoch": 1}))
            due, counted = checkpoints.due(step, recorded), step == recorded
            sampler = add_checkpoint(run, last.sampler, step)
            state = add_checkpoint(run, last.state, step, counted) if due else None
            saved = {"step": step, "sampler": sampler, "state": state, "phase": "saved"}
            file.write(line_of({**saved, "epoch": 1}))


def add_checkpoint(run: RunFolder, address: str, step: int, counted: bool = False) -> str:
    """Give a run's engine a checkpoint with the weights of another; return its address.

    If `counted`, the optimizer of a training state has taken as many steps as its number says.
    """
    of, kind, name = address.removeprefix("tinker://").split("/")
    records = run.engine / "checkpoints" / of / kind
    record = json.loads(unsealed((records / f"{name}.json").read_bytes()))
    source = run.engine / "tensors" / of / kind / record["folder"]
    made = f"{step:05d}{name[5:]}"
    folder = source.with_name(f"{made}{record['folder'].removeprefix(name)}")
    for path in source.iterdir():
        link_or_copy(path, folder / path.name)
    digests = record["sha256"]
    if counted:
        count_steps(folder / "optimizer.safetensors", step)
        digests = {path.name: sha256_of(path) for path in folder.iterdir()}
    described = {**record, "name": made, "folder": folder.name, "sha256": digests}
    (records / f"{made}.json").write_bytes(sealed(json.dumps(described).encode()))
    return f"tinker://{of}/{kind}/{made}"


def count_steps(optimizer: Path, steps: int) -> None:
    """Have a saved optimizer count so many steps."""
    tensors = load_file(optimizer)
    for name, tensor in tensors.items():
        if name.endswith("step"):
            tensor.fill_(steps)
    optimizer.unlink()
    save_file(tensors, optimizer)


if __name__ == "__main__":
    main()
