"""The chores, without a program. Run it in the project's folder, by `pytest`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROWS = Path(__file__).parents[1] / "datasets" / "chores.jsonl"
CHORES = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("chore", CHORES, ids=[chore["task"] for chore in CHORES])
def test_a_chore_earns_its_reward_once_it_is_done(chore: dict[str, Any], tmp_path: Path) -> None:
    for name, text in {**chore["files"], **chore["tests"]}.items():
        (tmp_path / name).write_text(text)

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", script], cwd=tmp_path, capture_output=True, text=True)

    assert run("check.sh").stdout != "1\n"
    assert run("solve.sh").returncode == 0
    assert run("check.sh").stdout == "1\n"
