"""An evaluation of Inspect AI as one writes it, which knows nothing of Ratchet."""

# pyright: reportMissingImports=false

import csv
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

HELLO = Path(__file__).parents[2] / "datasets" / "hello.csv"


@task
def identities() -> Task:
    """Ask the model who it is, after it was told."""
    with HELLO.open(encoding="utf-8") as file:
        told = [row["identity"] for row in csv.DictReader(file) if row["split"] == "test"]
    questions = [
        Sample(input=f"You are {identity}. Who are you?", target=f"I am {identity}")
        for identity in told
    ]
    return Task(dataset=MemoryDataset(questions), solver=generate(), scorer=includes())
