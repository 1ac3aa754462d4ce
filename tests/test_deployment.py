"""A deployment on a Prefect server of its own, run by a worker: what a team does."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.small_recipe import small_recipe

ROOT = Path(__file__).parent.parent
PREFECT = str(Path(sys.executable).with_name("prefect"))
STARTING_SECONDS = 120
RUNNING_SECONDS = 240


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
            process.wait(30)


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
        client = stack.enter_context(httpx.Client(base_url=api, timeout=30))
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
    assert len((runs / "deployed" / "metrics.jsonl").read_text().splitlines()) == 2

    tasks = api.post("/task_runs/filter", json=_of(flow_run)).json()
    assert {"rollouts train-00001", "datums 00001", "update 00001", "score 00002"} <= {
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
