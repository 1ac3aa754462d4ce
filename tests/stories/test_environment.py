"""Variables of a shell: a training plays with each of them, or ends with the variable's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tests.support.processes import ROOT

pytestmark = pytest.mark.story

SHORT = (
    *("steps=1", "rollouts.groups=2", "rollouts.group_size=4", "rollouts.max_tokens=16"),
    *("evaluation.examples=1", "evaluation.greedy=false", "tracking.project=shell"),
)
AWAY = "postgresql+asyncpg://me:pa55word@127.0.0.1:9/away"
NO_SERVER = {"PREFECT_API_URL": None}
"""Variables of a run that starts a Prefect server of its own."""
TRAIN = "from ratchet.flows.cli.main import main; main()"


def train(folder: Path, changed: dict[str, str | None]) -> "subprocess.CompletedProcess[str]":
    """Train in an empty folder, and a home of its own; a variable that is None is not there."""
    ours = ("PREFECT_", "TINKER_", "WANDB_", "RATCHET_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    own = {"PREFECT_HOME": f"{folder}/prefect", "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}
    server = {"PREFECT_API_URL": PREFECT_API_URL.value(), "HF_HOME": f"{folder}/hf"}
    given = {**variables, **own, **server, **changed}
    environment = {name: value for name, value in given.items() if value is not None}
    settings = [word for value in SHORT for word in ("--set", value)]
    command = [sys.executable, "-c", TRAIN, "train", "hello", *settings]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "changed",
    [
        {"SSL_CERT_FILE": "/nowhere/ca.pem"},
        {"SSL_CERT_FILE": "/nowhere/ca.pem", **NO_SERVER},
        {"HF_HOME": "/proc/none"},
        {"HF_HOME": None, "HOME": "/proc/none", "XDG_CACHE_HOME": None},
        {"PREFECT_HOME": None, "HOME": "/proc/none", **NO_SERVER},
        {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false", **NO_SERVER},
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONOPTIMIZE": "2", **NO_SERVER},
        {"WANDB_RUN_ID": "of-the-shell"},
    ],
    ids=lambda changed: " ".join(changed),
)
def test_a_training_plays_whatever_the_shell_has_set(
    changed: dict[str, str | None], tmp_path: Path
) -> None:
    ended = train(tmp_path, changed)
    assert ended.returncode in (0, 3), ended.stderr  # 3 if no group's rewards differ
    assert "step 1 of 1: reward" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_database_that_is_away_is_named_by_its_variable(tmp_path: Path) -> None:
    ended = train(tmp_path, {"PREFECT_API_DATABASE_CONNECTION_URL": AWAY, **NO_SERVER})
    assert ended.returncode == 2
    assert "PREFECT_API_DATABASE_CONNECTION_URL" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "pa55word" not in ended.stderr
