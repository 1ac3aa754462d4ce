"""Cost of `ratchet runs` and of SQL over many runs: seconds, and processor time.

    python -m benchmarks.growth.many_runs RUN 10000

copies a run, such as one of `ratchet train hello --steps 1`, so many times, by hard links but for
its manifest and its steps, and asks each question twice, since `runs` keeps what it reads.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import describe_machine, format_table
from ratchet.durable.files import link_or_copy
from ratchet.tasks.storage.files import read_json, write_json
from ratchet.tasks.storage.run_folder import RunFolder, folder_of

LEFT_OUT = ("engine", "report.html", "lock")
QUESTIONS = (
    ("runs",),
    ("runs", "--json"),
    ("sql", "select count(*) from steps"),
    ("sql", "select run, max(reward) from evaluations group by run limit 5"),
    ("sql", "select count(*) from spans where run = 'copy-00007'"),
    ("sql", "select count(*) from spans"),
)


def copy(run: RunFolder, path: Path) -> None:
    """Copy a run without its engine; every copy has its own manifest and log of steps."""
    for source in run.path.rglob("*"):
        name = source.relative_to(run.path)
        if source.is_file() and name.parts[0] not in LEFT_OUT:
            link_or_copy(source, path / name)
    own = RunFolder(path)
    for file in (own.manifest, own.metrics):
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    write_json(own.manifest, read_json(own.manifest))


def measure(words: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a command."""
    before, began = os.times(), time.monotonic()
    command = [sys.executable, "-m", "ratchet.flows.cli.main", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system
    return time.monotonic() - began, spent - before.children_user - before.children_system


def main() -> None:
    run, many = folder_of(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(dir=run.path.parent, prefix=".many-") as root:
        for number in range(many):
            copy(run, Path(root) / f"copy-{number:05d}")
        os.environ["RATCHET_RUNS"] = root
        print(describe_machine())
        rows = list[list[str]]()
        for words in QUESTIONS:
            first, again = measure(words), measure(words)
            rows.append([" ".join(words), *(f"{value:.1f}" for value in (*first, *again))])
        columns = ["question", "first s", "processor s", "again s", "processor s"]
        print(format_table(f"{many} runs", columns, rows))


if __name__ == "__main__":
    main()
