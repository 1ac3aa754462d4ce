"""A run in an object store, whose machine dies: another one goes on, to the same bytes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.interruptions.compare_runs import differing_parts, read_contents
from ratchet.tasks.storage.run_folder import RunFolder, runs_root
from tests.support.processes import wait_until
from tests.support.stores.object_store import object_store, variables_for

pytestmark = pytest.mark.story
STEPS = 4
TRAIN = ["train", "hello", "--run", "hello", "--steps", str(STEPS)]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ratchet.flows.cli.main", *words]


def test_a_run_goes_on_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    subprocess.run(
        command(*TRAIN), env=os.environ | {"RATCHET_RUNS": str(tmp_path)}, check=True, timeout=200
    )
    (tmp_path / "store").mkdir()
    with object_store(tmp_path / "store") as store:
        for name, value in variables_for(store.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RATCHET_RUNS", "s3://team/runs")

        def on(machine: str, *words: str) -> str:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
            ended = subprocess.run(command(*words), capture_output=True, text=True, timeout=200)
            assert ended.returncode == 0, ended.stderr
            return ended.stdout + ended.stderr

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
        died = RunFolder(runs_root() / "hello")
        with (tmp_path / "log").open("w") as log:
            first = subprocess.Popen(command(*TRAIN), stderr=log, start_new_session=True)
        wait_until("two steps are done", lambda: len(died.updated("policy")) > 1, 200)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        said = on("b", "resume", "s3://team/runs/hello")
        assert re.search(r"Kept are \d steps? and, .* all that were sealed: \d", said)
        assert re.search(r"Played again are at most\s+those that were open: [01]\b", said)
        assert f"in {STEPS} steps" in said
        here = RunFolder(runs_root() / "hello")
        whole = read_contents(RunFolder(tmp_path / "hello"))
        assert differing_parts(read_contents(here), whole) == []
        for words in (["runs"], ["costs", "hello"], ["verify", "hello"], ["report", "hello"]):
            assert on("c", *words)
        assert str(STEPS) in on("c", "sql", "--run", "hello", "select count(*) from steps")
        on("c", "fork", "hello", "--at", "2", "--run", "fork", "--set", "steps=3")
        on("d", "export", "fork", "--out", str(tmp_path / "exported"))
        on("d", "evaluate", "hello", "--model", "hello@2")
        assert "fork" in on("e", "compare", "--agent", "hello", "hello@2", "fork")
        assert re.search(
            r"\d checkpoints, [\d.]+ MB: rem", on("f", "prune", "--checkpoints", "--yes")
        )
        assert not [*(tmp_path / "f").rglob("*.safetensors")]
        assert "2 runs" in on("f", "prune", "--older", "0", "--yes")
        assert "holds no runs" in on("g", "runs")
