"""A run in a process of its own, which ends by a signal."""

import os
import subprocess
import sys
from signal import SIGKILL, Signals

from prefect.settings import PREFECT_API_URL

from tests.support.processes import ROOT


def train_until_killed(module: str, *words: str, by: Signals = SIGKILL) -> None:
    """Train by a module of this folder, which has a signal end its process."""
    variables = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""}
    command = [sys.executable, "-m", f"tests.support.runs.{module}", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, check=False, timeout=250
    )
    assert ended.returncode in (-by, 128 + by), ended.stderr.decode()
