"""Sweeps whose runs the workers of a Prefect server train, two at a time, and never one twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.tasks.storage.owners import last_owner
from ratchet.tasks.storage.plan_record import read_plan
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import ROOT, wait_until
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.prefect_team import RUNNING_SECONDS, open_team

pytestmark = [pytest.mark.story, pytest.mark.timeout(1800)]

RATES = (0.002, 0.003, 0.004)
UNREWARDED = "tests.support.agents.unrewarded:play"
CHILDREN = [f"some-lr{rate}" for rate in RATES]
FAILED = "some-agenttests.support.agents.unrewarded-play"
AT_ONCE = 2
BASE = small_recipe(steps=1, checkpoints={"every": 1}).model_dump(mode="json")


@dataclass(frozen=True)
class Team:
    """A Prefect server with a worker, and the folder of the runs of both."""

    api: httpx.Client
    folder: Path

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """Begin a command beside the server, whose output is in the folder."""
        variables = {
            **{name: of for name, of in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_URL": str(self.api.base_url).rstrip("/"),
            "RATCHET_RUNS": str(self.folder / "runs"),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "ratchet.flows.cli.main", *words],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def flow_runs(self, *names: str) -> list[dict[str, Any]]:
        """List the flow runs of runs that workers train, in the order in which they were made."""
        found = self.api.post(
            "/flow_runs/filter",
            json={
                "flow_runs": {"name": {"any_": [*names]}, "deployment_id": {"is_null_": False}},
                "sort": "EXPECTED_START_TIME_ASC",
            },
        )
        return found.json()

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / name)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    variables = {**os.environ, "RATCHET_RUNS": str(folder / "runs")}
    command = [sys.executable, "-m", "ratchet.flows.cli.main"]
    with open_team(command, ROOT, folder, variables, "hello-swept") as api:
        yield Team(api, folder)


@pytest.fixture(scope="module")
def said(team: Team) -> str:
    """What a sweep says that was killed when its first run had ended, and that has gone on."""
    first, *others = ({"optimizer.learning_rate": rate} for rate in RATES)
    values = [first, {"judge.agent": UNREWARDED}, *others]
    recipe = {"flow": "sweep", "base": BASE, "listed": values, "at_once": AT_ONCE}
    (team.folder / "sweep.yaml").write_text(json.dumps(recipe))
    killed = team.begin("sweep", str(team.folder / "sweep.yaml"), "--run", "some")

    def has_one() -> bool:
        assert killed.poll() is None, killed.communicate()[0]
        return any(one["state"]["type"] == "COMPLETED" for one in team.flow_runs(CHILDREN[0]))

    wait_until("the first run ends", has_one, RUNNING_SECONDS)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    resumed = team.begin("resume", "some")
    output, _ = resumed.communicate(timeout=RUNNING_SECONDS)
    assert resumed.returncode == 0, output
    return output


def test_no_run_is_repeated_and_those_under_way_are_taken_up(team: Team, said: str) -> None:
    for name in CHILDREN:
        (flow_run,) = team.flow_runs(name)
        assert flow_run["state"]["type"] == "COMPLETED"
        owner = last_owner(team.run(name).owners)
        assert owner is not None
        assert owner.epoch == 1


def test_two_runs_are_trained_at_a_time_and_never_three(team: Team, said: str) -> None:
    flow_runs = team.flow_runs(*CHILDREN, FAILED)
    assert most_at_once(flow_runs, "created") <= AT_ONCE
    assert most_at_once(flow_runs, "start_time") == AT_ONCE


def most_at_once(flow_runs: list[dict[str, Any]], begins: str) -> int:
    """Count how many flow runs were at most between their begin and their end."""
    return max(
        sum(one[begins] <= other[begins] < one["end_time"] for one in flow_runs)
        for other in flow_runs
    )


def test_a_run_that_fails_is_a_row_and_the_same_command_tries_it_again(
    team: Team, said: str
) -> None:
    failed = team.flow_runs(FAILED)
    assert {one["state"]["type"] for one in failed} == {"FAILED"}
    names, rows = read_plan(team.run("some")).table()
    errors = {str(row[names.index("run")]): str(row[names.index("error")]) for row in rows}
    assert errors.pop(FAILED).startswith("StepStopped: ")
    assert errors == dict.fromkeys(CHILDREN, "None")
    assert "is the best of 4 runs, 1 of which failed" in said
    again = team.begin(
        "sweep", str(team.folder / "sweep.yaml"), "--run", "some", "--if-exists=resume"
    )
    output, _ = again.communicate(timeout=RUNNING_SECONDS)
    assert again.returncode == 0, output
    assert len(team.flow_runs(FAILED)) == len(failed) + 1
    assert len(team.flow_runs(*CHILDREN)) == len(CHILDREN)
