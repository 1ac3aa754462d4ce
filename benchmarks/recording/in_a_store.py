"""Measure how long a step of hello waits for an object store, by the latency of the line to it.

Each run is trained by a process of its own, in which each `put` is timed: those of sealed batches
and of recorded steps. The store is SeaweedFS on this machine, and the line to it delays each byte.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measuring import describe_machine
from tests.support.stores.object_store import line_to, object_store, variables_for

TIMED = """
import json, os, time
from ratchet.tasks.storage import mirror

waited, flush = [], mirror.Mirror.flush

def timed(self):
    began = time.monotonic()
    flush(self)
    waited.append(time.monotonic() - began)
    with open(os.environ["WAITED"], "w") as file:
        json.dump(waited, file)

mirror.Mirror.flush = timed
from ratchet.flows.cli.main import main
main()
"""


def train(folder: Path, run: str, steps: int) -> list[float]:
    """Train hello by the environment; return how long each `put` has waited."""
    words = ["train", "hello", "--run", run, "--steps", str(steps)]
    variables = {**os.environ, "WAITED": str(folder / run), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-c", TIMED, *words]
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / run).read_text(encoding="utf-8"))


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--latency", type=float, nargs="+", default=[0, 1, 50], help="in ms")
    arguments = options.parse_args()
    print(describe_machine(), flush=True)
    with TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "store").mkdir()
        with object_store(folder / "store") as store, line_to(store) as line:
            os.environ |= variables_for(line.port) | {"RATCHET_RUNS": "s3://team/runs"}
            for latency in arguments.latency:
                line.delay = latency / 2000  # each way
                waited = train(folder, f"at-{latency:g}-ms", arguments.steps)
                _, *others = waited  # the opening makes the bucket
                step = sum(others) / arguments.steps
                print(
                    f"{latency:g} ms: a step waits {1000 * step:.0f} ms for the store, in "
                    f"{len(others)} puts of {1000 * median(others):.0f} ms (median)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
