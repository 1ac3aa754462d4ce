"""A deployment on a Prefect server of its own, run by a worker: what a team does."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.journal import read_journal
from tests.prefect_api import prefect_api
from tests.small_recipe import small_recipe, with_fault

pytestmark = pytest.mark.story

ROOT = Path(__file__).parent.parent
PREFECT = str(Path(sys.executable).with_name("prefect"))
STARTING_SECONDS = 120
RUNNING_SECONDS = 240

AFTER_THE_FAULT = {
    "spans/train-00001.0",
    "trajectories/00001",
    "datums/00001",
    "updates/00001",
    "shards/test-00002",
    "spans/test-00002.0",
    "shards/greedy-00002",
    "spans/greedy-00002.0",
    "evaluations/00002",
}


@contextmanager
def running(command: list[str], variables: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):  # Prefect waits for what a busy machine owes
                process.wait(60)
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A server, the project's deployments on it, and a worker; the API, and the folder of runs."""
    folder = tmp_path_factory.mktemp("team")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    api = f"http://127.0.0.1:{port}/api"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "RATCHET_RUNS": str(folder / "runs"),
        "PWD": str(ROOT),
    }
    with ExitStack() as stack:
        server = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", port]
        stack.enter_context(running(server, variables, folder / "server.log"))
        client = stack.enter_context(prefect_api(api))
        _wait_for_health(client)
        for command in (
            ["work-pool", "create", "ratchet", "--type", "process", "--overwrite"],
            ["--no-prompt", "deploy", "--all"],
        ):
            subprocess.run([PREFECT, *command], cwd=ROOT, env=variables, check=True, timeout=120)
        worker = [PREFECT, "worker", "start", "--pool", "ratchet"]
        stack.enter_context(running(worker, variables, folder / "worker.log"))
        yield client, folder / "runs"


def test_a_deployment_trains_and_shows_itself(team: tuple[httpx.Client, Path]) -> None:
    api, runs = team
    recipe = small_recipe().model_dump(mode="json")
    deployment = api.get("/deployments/name/train/hello").json()
    flow_run = _run(api, deployment["id"], {"recipe": recipe, "run": "deployed"})
    assert flow_run["state"]["type"] == "COMPLETED", _log(api, flow_run["id"])
    assert flow_run["name"] == "deployed"
    assert len((runs / "deployed" / "metrics.jsonl").read_text().splitlines()) == 2

    tasks = api.post("/task_runs/filter", json=_of(flow_run)).json()
    assert {"spans/train-00001.0", "datums/00001", "updates/00001", "evaluations/00002"} <= {
        task["name"] for task in tasks
    }
    artifacts = {a["key"]: a for a in api.post("/artifacts/filter", json=_of(flow_run)).json()}
    assert set(artifacts) == {"deployed-progress", "deployed-metrics", "deployed-transcripts"}
    assert artifacts["deployed-progress"]["data"] == 100
    assert len(json.loads(artifacts["deployed-metrics"]["data"])) == 2
    assert "## best: train-00001-" in artifacts["deployed-transcripts"]["data"]


def test_a_misspelt_key_is_refused_when_the_run_is_created(
    team: tuple[httpx.Client, Path],
) -> None:
    api, _ = team
    deployment = api.get("/deployments/name/train/hello").json()["id"]
    recipe = small_recipe().model_dump(mode="json") | {"stepps": 3}
    refused = api.post(
        f"/deployments/{deployment}/create_flow_run", json={"parameters": {"recipe": recipe}}
    )
    assert refused.status_code == 409
    assert "stepps" in refused.text


def test_retry_of_a_failed_run_redoes_only_what_is_missing(
    team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    """The second step's first try ends when its engine is killed."""
    api, runs = team
    recipe = small_recipe(**with_fault(tmp_path, "engine"))
    failed = _run(api, _hello(api), {"recipe": recipe.model_dump(mode="json"), "run": "retried"})
    assert failed["state"]["type"] == "FAILED", _log(api, failed["id"])
    assert "process" in failed["state"]["message"]
    before = _worked(api, failed)
    assert before["spans/train-00001.0"] == 1

    done = _retried(api, failed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2), _log(api, done["id"])
    again = {name: count - before[name] for name, count in _worked(api, done).items()}
    assert {name for name, count in again.items() if count} == AFTER_THE_FAULT
    assert set(again.values()) <= {0, 1}
    assert len((runs / "retried" / "metrics.jsonl").read_text().splitlines()) == 2
    assert _attempts(runs / "retried") == {"train-00000": {0}, "train-00001": {0, 1}}


def test_a_run_whose_process_was_killed_goes_on_in_its_own_folder(
    team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    api, runs = team
    recipe = small_recipe(**with_fault(tmp_path, "kill"))
    crashed = _run(api, _hello(api), {"recipe": recipe.model_dump(mode="json")})
    assert crashed["state"]["type"] == "CRASHED", _log(api, crashed["id"])
    before = _worked(api, crashed)

    _wait_for_the_worker(api, crashed)
    done = _retried(api, crashed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2), _log(api, done["id"])
    again = {name: count - before[name] for name, count in _worked(api, done).items()}
    assert {name for name, count in again.items() if count} == AFTER_THE_FAULT
    (folder,) = runs.glob(f"*-{crashed['id'][:8]}")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def _hello(api: httpx.Client) -> str:
    return api.get("/deployments/name/train/hello").json()["id"]


def _retried(api: httpx.Client, flow_run: dict[str, Any]) -> dict[str, Any]:
    """What the button *Retry* of Prefect's UI sends, and the end of it."""
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    answer = api.post(
        f"/flow_runs/{flow_run['id']}/set_state", json={"state": state, "force": False}
    )
    assert answer.json()["status"] == "ACCEPT", answer.text
    return wait_for_end(api, flow_run["id"])


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


def _wait_for_health(client: httpx.Client) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise TimeoutError("the Prefect server did not start")


def _run(api: httpx.Client, deployment: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Create a flow run, and wait for its end."""
    created = api.post(
        f"/deployments/{deployment}/create_flow_run",
        json={"parameters": parameters, "state": {"type": "SCHEDULED"}},
    )
    assert created.status_code == 201, created.text
    return wait_for_end(api, created.json()["id"])


def wait_for_end(api: httpx.Client, flow_run: str) -> dict[str, Any]:
    deadline = time.monotonic() + RUNNING_SECONDS
    while time.monotonic() < deadline:
        found = api.get(f"/flow_runs/{flow_run}").json()
        if found["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return found
        time.sleep(0.5)
    raise TimeoutError(_log(api, flow_run))


def _of(flow_run: dict[str, Any]) -> dict[str, Any]:
    return {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}


def _log(api: httpx.Client, flow_run: str) -> str:
    wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}}}
    return "\n".join(line["message"] for line in api.post("/logs/filter", json=wanted).json())
