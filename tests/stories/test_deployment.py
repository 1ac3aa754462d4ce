"""A deployment on a Prefect server of its own, run by a worker: what a team does."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.flows.cli.new_project import AGENT, write_project
from ratchet.flows.server.worker import IN_FOLDER
from ratchet.tasks.recording.journal import read_journal
from tests.support.processes import wait_until
from tests.support.runs.small_recipe import small_recipe, with_faults
from tests.support.servers.prefect_team import (
    RUNNING_SECONDS,
    open_team,
    read_log,
    retry,
    run_deployment,
)

pytestmark = pytest.mark.story

ROOT = Path(__file__).parents[2]

CLONES = "prefect.deployments.steps.git_clone"
AFTER_THE_FAULT = {
    "spans/train-00001.0",
    "updates/00001",
    "shards/test-00002",
    "spans/test-00002.0",
    "shards/greedy-00002",
    "spans/greedy-00002.0",
    "evaluations/00002",
}


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A server, the project's deployments on it, and a worker; the API, and the folder of runs."""
    folder = tmp_path_factory.mktemp("team")
    variables = {**os.environ, "RATCHET_RUNS": str(folder / "runs")}
    ratchet = [sys.executable, "-m", "ratchet.flows.cli.main"]
    with open_team(ratchet, ROOT, folder, variables) as api:
        yield api, folder / "runs"


def test_a_deployment_trains_and_shows_itself(team: tuple[httpx.Client, Path]) -> None:
    api, runs = team
    recipe = small_recipe().model_dump(mode="json")
    deployment = api.get("/deployments/name/train/hello").json()
    flow_run = run_deployment(api, deployment["id"], {"recipe": recipe, "run": "deployed"})
    assert flow_run["state"]["type"] == "COMPLETED", read_log(api, flow_run["id"])
    assert flow_run["name"] == "deployed"
    assert flow_run["state"]["message"].startswith("held-out reward ")
    assert len((runs / "deployed" / "metrics.jsonl").read_text().splitlines()) == 2

    tasks = api.post("/task_runs/filter", json=_of(flow_run)).json()
    assert {"spans/train-00001.0", "updates/00001", "evaluations/00002"} <= {
        task["name"] for task in tasks
    }
    artifacts = {a["key"]: a for a in api.post("/artifacts/filter", json=_of(flow_run)).json()}
    shown = ("progress", "curves", "metrics", "transcripts", "evaluations")
    assert set(artifacts) == {f"deployed-{name}" for name in shown}
    assert str(runs / "deployed" / "report.html") in artifacts["deployed-curves"]["data"]
    assert artifacts["deployed-progress"]["data"] == 100
    assert len(json.loads(artifacts["deployed-metrics"]["data"])) == 2
    assert "## best: train-00001-" in artifacts["deployed-transcripts"]["data"]


def test_the_ui_asks_the_server_that_serves_it(team: tuple[httpx.Client, Path]) -> None:
    api, _ = team
    address = str(api.base_url).rstrip("/")
    asked = httpx.get(f"{address.removesuffix('/api')}/ui-settings").json()
    assert asked["api_url"] == address


def test_a_misspelt_key_is_refused_when_the_run_is_created(team: tuple[httpx.Client, Path]) -> None:
    api, _ = team
    deployment = api.get("/deployments/name/train/hello").json()["id"]
    recipe = small_recipe().model_dump(mode="json") | {"stepps": 3}
    refused = api.post(
        f"/deployments/{deployment}/create_flow_run", json={"parameters": {"recipe": recipe}}
    )
    assert refused.status_code == 409
    assert "stepps" in refused.text


@pytest.mark.parametrize("place", ["a folder that is gone", "the worker's own", "a Git commit"])
def test_a_flow_run_starts_only_where_its_deployment_s_code_is(
    place: str, team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    api, runs = team
    deployment, gone = _hello(api), tmp_path / "gone"
    recipe = small_recipe(steps=1).model_dump(mode="json")
    step = {IN_FOLDER: {"directory": str(gone) if "gone" in place else "."}}
    if place == "a Git commit":
        recipe |= {
            "agent": AGENT,
            "dataset": {"path": "datasets/introduce.csv", "columns": ["identity"]},
        }
        step = {CLONES: {"repository": f"file://{tmp_path}", "commit_sha": _project_in(tmp_path)}}
    before = api.get(f"/deployments/{deployment}").json()["pull_steps"]
    api.patch(f"/deployments/{deployment}", json={"pull_steps": [step]}).raise_for_status()
    ended = run_deployment(api, deployment, {"recipe": recipe, "run": place.split()[-1]})
    api.patch(f"/deployments/{deployment}", json={"pull_steps": before}).raise_for_status()
    state, worker_log = ended["state"], runs.with_name("worker.log")
    if "gone" in place:
        assert state["type"] == "CRASHED"
        assert f"has no folder {gone}, where hello has its code" in state["message"]
        wait_until("the page has it", lambda: state["message"] in read_log(api, ended["id"]), 60)
        assert state["message"] in worker_log.read_text().replace("\n", "")
    else:
        assert state["type"] == "COMPLETED", read_log(api, ended["id"])
    assert "Traceback" not in worker_log.read_text()


def test_retry_of_a_failed_run_redoes_only_what_is_missing(
    team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    """The second step's engine is killed in each of its three starts, which ends the run."""
    api, runs = team
    recipe = small_recipe(**with_faults(tmp_path, "engine engine engine"))
    failed = run_deployment(
        api, _hello(api), {"recipe": recipe.model_dump(mode="json"), "run": "retried"}
    )
    assert failed["state"]["type"] == "FAILED", read_log(api, failed["id"])
    assert "process" in failed["state"]["message"]
    before = _worked(api, failed)
    assert before["spans/train-00001.0"] == 3

    done = retry(api, failed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2), read_log(api, done["id"])
    again = {name: count - before[name] for name, count in _worked(api, done).items()}
    assert {name for name, count in again.items() if count} == AFTER_THE_FAULT
    assert set(again.values()) <= {0, 1}
    assert len((runs / "retried" / "metrics.jsonl").read_text().splitlines()) == 2
    assert _attempts(runs / "retried") == {"train-00000": {0}, "train-00001": {0, 1, 2, 3}}


def test_a_run_whose_process_was_killed_goes_on_in_its_own_folder(
    team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    api, runs = team
    recipe = small_recipe(**with_faults(tmp_path, "kill"))
    crashed = run_deployment(api, _hello(api), {"recipe": recipe.model_dump(mode="json")})
    assert crashed["state"]["type"] == "CRASHED", read_log(api, crashed["id"])
    before = _worked(api, crashed)

    _wait_for_the_worker(api, crashed)
    done = retry(api, crashed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2), read_log(api, done["id"])
    again = {name: count - before[name] for name, count in _worked(api, done).items()}
    assert {name for name, count in again.items() if count} == AFTER_THE_FAULT
    (folder,) = runs.glob(f"*-{crashed['id'][:8]}")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def _project_in(folder: Path) -> str:
    """Write a new project into a Git repository, and return its commit."""
    write_project(folder)
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "Begin")):
        subprocess.run([*git, *words], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def _hello(api: httpx.Client) -> str:
    return api.get("/deployments/name/train/hello").json()["id"]


def _wait_for_the_worker(api: httpx.Client, flow_run: dict[str, Any]) -> None:
    """It says twice that a run has crashed, the second time over what came in between."""
    wanted = {
        "event": {"name": ["prefect.worker.executed-flow-run"]},
        "related": {"id": [f"prefect.flow-run.{flow_run['id']}"]},
    }
    deadline = time.monotonic() + RUNNING_SECONDS
    while not api.post("/events/filter", json={"filter": wanted}).json()["events"]:
        assert time.monotonic() < deadline, "the worker does not notice that its process has ended"
        time.sleep(0.5)


def _worked(api: httpx.Client, flow_run: dict[str, Any]) -> Counter[str]:
    """Task run → how often it did its work: it ran, and did not end as Cached."""
    worked: Counter[str] = Counter()
    for task in api.post("/task_runs/filter", json=_of(flow_run)).json():
        states = api.get("/task_run_states/", params={"task_run_id": task["id"]}).json()
        names = Counter(state["name"] for state in states)
        worked[task["name"]] += names["Running"] - names["Cached"]
    return worked


def _attempts(run: Path) -> dict[str, set[int]]:
    spans = [read_journal(path) for path in sorted((run / "journal").glob("train-*.jsonl"))]
    return {batch[0]["shard"]: {span["attempt"] for span in batch} for batch in spans}


def _of(flow_run: dict[str, Any]) -> dict[str, Any]:
    return {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
