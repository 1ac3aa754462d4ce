"""A worker that dies with its flow run: the server says so, and another one goes on with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, wait_until
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.prefect_team import (
    HEARTBEAT_SECONDS,
    RUNNING_SECONDS,
    open_team,
    read_log,
    retry,
    wait_for_end,
)

pytestmark = [pytest.mark.story, pytest.mark.timeout(1800)]

RATCHET = [sys.executable, "-m", "ratchet.flows.cli.main"]


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def kill_worker() -> dict[str, str]:
    """Kill the worker that this process has started, with its children; return its environment."""
    [worker] = [
        child
        for child in children(os.getpid())
        if b"worker" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]
    pairs = Path(f"/proc/{worker}/environ").read_text().rstrip("\0").split("\0")
    for process in (*children(worker), worker):
        os.kill(process, signal.SIGKILL)
    return dict(pair.split("=", 1) for pair in pairs)


def test_a_flow_run_that_died_with_its_worker_crashes_and_goes_on_by_retry(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    recipe = small_recipe(checkpoints={"every": 1}).model_dump(mode="json")
    created = {"parameters": {"recipe": recipe, "run": "one"}, "state": {"type": "SCHEDULED"}}
    variables = {**os.environ, "RATCHET_RUNS": str(run.parent)}
    with open_team(RATCHET, ROOT, tmp_path, variables, "hello-swept") as api:
        deployment = api.get("/deployments/name/train/hello-swept").json()["id"]
        flow_run = api.post(f"/deployments/{deployment}/create_flow_run", json=created).json()["id"]
        beat = {"event": {"name": ["prefect.flow-run.heartbeat"]}}

        def has_begun() -> bool:
            beats = api.post("/events/filter", json={"filter": beat}).json()["events"]
            return bool(beats) and (run / "metrics.jsonl").exists()

        wait_until("the first step is done", has_begun, RUNNING_SECONDS)
        environment = kill_worker()
        assert api.get(f"/flow_runs/{flow_run}").json()["state"]["type"] == "RUNNING"
        crashed = wait_for_end(api, flow_run)
        assert crashed["state"]["type"] == "CRASHED", read_log(api, flow_run)
        assert f"no heartbeat for {3 * HEARTBEAT_SECONDS} s" in crashed["state"]["message"]
        another = subprocess.Popen([*RATCHET, "worker"], cwd=ROOT, env=environment)
        try:
            done = retry(api, crashed)
        finally:
            another.terminate()
            another.wait()
        assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
