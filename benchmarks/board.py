"""Time to the board's first page over many runs: `python -m benchmarks.board [RUNS] [STEPS]`."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from durable.files import link_or_copy
from flows.recipe.loading import named_recipe
from tasks.evaluations import ScoredRollout, score_outcomes
from tasks.storage.files import write_json
from tasks.storage.logs import append_row
from tasks.storage.manifest import read_manifest, write_manifest
from tasks.storage.run_folder import RunFolder

EXAMPLES = 128
METRICS = 40
"""Metrics of a step, as hello has them."""


def write_runs(root: Path, runs: int, steps: int) -> None:
    """Write runs of hello that differ in seed and learning rate: what the board's table reads.

    The runs share their metrics and evaluations, by links, as a fork shares its parent's.
    """
    recipe = named_recipe("hello", [f"steps={steps}"]).model_dump(mode="json")
    first = RunFolder(root / "hello-0000")
    write_manifest(first, recipe, "f00d")
    draw = random.Random(0)
    for step in range(steps):
        numbers = {f"some/metric_{number}": draw.random() for number in range(METRICS)}
        reward = {"reward/mean": min(1.0, draw.gauss(step / steps, 0.05)), "tokens/sampled": 900}
        append_row(first.metrics, {"step": step, **reward, **numbers})
    for step in (0, steps):
        rewards = [float(draw.random() < step / steps) for _ in range(EXAMPLES)]
        scored = score_outcomes([ScoredRollout(str(k), reward) for k, reward in enumerate(rewards)])
        scores = scored.model_dump(mode="json")
        write_json(first.evaluation(f"{step:05d}"), {"sampled": scores, "greedy": scores})
    shared = [first.metrics, *first.evaluations()]
    described = read_manifest(first)
    for number in range(1, runs):
        run = RunFolder(root / f"hello-{number:04d}")
        optimizer = {**recipe["optimizer"], "learning_rate": draw.choice([0.005, 0.001, 0.0005])}
        write_json(
            run.manifest, {**described, "recipe": recipe | {"seed": number, "optimizer": optimizer}}
        )
        for path in shared:
            link_or_copy(path, run.path / path.relative_to(first.path))


def main() -> None:
    """Print the seconds of the first page, of the same page again, and of the table by reward."""
    runs, steps = (int(text) for text in [*sys.argv[1:], "1000", "100"][:2])
    with TemporaryDirectory() as folder:
        write_runs(Path(folder), runs, steps)
        command = [sys.executable, "-m", "flows.cli.main", "board"]
        environment = {**os.environ, "RATCHET_RUNS": folder}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            base = address.partition("?")[0]
            process = psutil.Process(server.pid)
            with httpx.Client(timeout=120, follow_redirects=True) as browser:
                by_reward = f"{base}?sort=reward"
                asked = {"first page": address, "again": base, "by reward": by_reward}
                for name, page in {**asked, "by reward, again": by_reward}.items():
                    began, cpu = time.perf_counter(), process.cpu_times().user
                    browser.get(page).raise_for_status()
                    wall, cpu = time.perf_counter() - began, process.cpu_times().user - cpu
                    print(f"{runs} runs of {steps} steps, {name}: {wall:.2f} s, {cpu:.2f} s of CPU")
            server.communicate()


if __name__ == "__main__":
    main()
