"""The Tinker cookbook's own RL loop, unmodified, against `ratchet engine`."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "cookbook_program.py"
COOKBOOK_PYTHON = ROOT / os.environ.get("COOKBOOK_PYTHON", ".venv-cookbook/bin/python")
RATCHET = Path(sysconfig.get_path("scripts")) / "ratchet"


@pytest.mark.skipif(
    not COOKBOOK_PYTHON.exists(),
    reason=f"the cookbook is not installed: there is no {COOKBOOK_PYTHON}; run `make cookbook`",
)
def test_the_cookbooks_own_rl_loop_trains_and_its_reward_rises(tmp_path: Path) -> None:
    with engine(tmp_path) as environment:
        finished = subprocess.run(
            [COOKBOOK_PYTHON, PROGRAM, tmp_path / "log"],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
    assert finished.returncode == 0, finished.stdout[-4000:]
    rewards = rewards_of(tmp_path / "log" / "metrics.jsonl")
    assert len(rewards) == 12
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.3, rewards


@contextmanager
def engine(folder: Path) -> Iterator[dict[str, str]]:
    """Start an engine; yield the environment of a program that evaluated what it prints."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TINKER_")},
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TINKER_TELEMETRY": "0",
    }
    with subprocess.Popen(
        [RATCHET, "engine", "--state", folder / "state", "--exit-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            for _ in range(2):
                exported = process.stdout.readline().removeprefix("export ").strip()
                name, _, value = exported.partition("=")
                environment[name] = value
            assert {"TINKER_BASE_URL", "TINKER_API_KEY"} <= environment.keys()
            yield environment
        finally:
            process.kill()


def rewards_of(metrics: Path) -> list[float]:
    """Read the mean reward of every iteration, as the cookbook logged it."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
