"""What a team has: a Prefect server, a project's deployments on it, and a worker that runs them."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prefect.client.base import PrefectHttpxSyncClient

from tests.support.processes import free_port, wait_until

ANSWER_SECONDS = 120.0
"""On a busy machine the server may wait 60 s for its SQLite database."""
STARTING_SECONDS = 300
DEPLOYING_SECONDS = 600
RUNNING_SECONDS = 600
HEARTBEAT_SECONDS = 30


def prefect_api(url: str) -> httpx.Client:
    """Asks again where the server says that its database is locked. Errors are answers."""
    return PrefectHttpxSyncClient(base_url=url, timeout=ANSWER_SECONDS, raise_on_all_errors=False)


@contextmanager
def open_team(
    ratchet: Sequence[str],
    project: Path,
    folder: Path,
    variables: Mapping[str, str],
    deployment: str = "",
    database: str = "",
) -> Iterator[httpx.Client]:
    """Start server and worker by the command `ratchet`; yield the API.

    All of the project is deployed, or one deployment of it. The server keeps what it knows in
    `database`, by default SQLite's.

    The logs, and what Prefect keeps, are in `folder`.
    """
    port = str(free_port())
    environment = {
        **{name: value for name, value in variables.items() if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }

    @contextmanager
    def running(*words: str, **further: str) -> Iterator[None]:
        with (folder / f"{words[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                [*ratchet, *words],
                cwd=project,
                env=environment | further,
                stdout=log,
                stderr=log,
            )
            try:
                yield
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):  # it waits for what a busy machine owes
                    process.wait(60)
                process.kill()
                process.wait()

    with ExitStack() as stack:
        kept = {"PREFECT_API_DATABASE_CONNECTION_URL": database} if database else {}
        stack.enter_context(running("server", "--port", port, **kept))
        api = stack.enter_context(prefect_api(environment["PREFECT_API_URL"]))
        wait_until("the server answers", partial(answers, api), STARTING_SECONDS)
        subprocess.run(
            [*ratchet, "deploy", *filter(None, [deployment])],
            cwd=project,
            env=environment,
            check=True,
            timeout=DEPLOYING_SECONDS,
        )
        stack.enter_context(running("worker"))
        looking = partial(api.post, "/work_pools/ratchet/workers/filter", json={})
        wait_until("the worker looks for flow runs", lambda: looking().json(), STARTING_SECONDS)
        yield api


def run_deployment(
    api: httpx.Client, deployment: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Create a flow run, and wait for its end."""
    return wait_for_end(api, create_flow_run(api, deployment, parameters))


def create_flow_run(api: httpx.Client, deployment: str, parameters: Mapping[str, Any]) -> str:
    """Create a flow run, which a worker is to begin, and return its id."""
    created = api.post(
        f"/deployments/{deployment}/create_flow_run",
        json={"parameters": parameters, "state": {"type": "SCHEDULED"}},
    )
    assert created.status_code == 201, created.text
    return created.json()["id"]


def wait_for_end(api: httpx.Client, flow_run: str) -> dict[str, Any]:
    """Wait for the end of a flow run, and return it."""
    deadline = time.monotonic() + RUNNING_SECONDS
    while time.monotonic() < deadline:
        found = api.get(f"/flow_runs/{flow_run}").json()
        if found["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return found
        time.sleep(0.5)
    raise TimeoutError(read_log(api, flow_run))


def wait_for_schedule(api: httpx.Client, deployment: str) -> dict[str, Any]:
    """Wait for the end of the first flow run that a deployment's schedule has started; return it.

    The deployment is paused afterwards, and what the schedule has started meanwhile is waited for.
    """
    wanted = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
    started = {"state": {"type": {"not_any_": ["SCHEDULED"]}}}

    def of_schedule() -> list[dict[str, Any]]:
        found = api.post("/flow_runs/filter", json={**wanted, "flow_runs": started}).json()
        return [flow_run for flow_run in found if flow_run["auto_scheduled"]]

    wait_until("a schedule fires", lambda: bool(of_schedule()), RUNNING_SECONDS)
    first, *_ = of_schedule()
    ended = wait_for_end(api, first["id"])
    api.post(f"/deployments/{deployment}/pause_deployment")
    for later in of_schedule():
        wait_for_end(api, later["id"])
    return ended


def read_log(api: httpx.Client, flow_run: str) -> str:
    """Return what a flow run has logged."""
    wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}}}
    return "\n".join(line["message"] for line in api.post("/logs/filter", json=wanted).json())


def answers(api: httpx.Client) -> bool:
    try:
        return api.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def retry(api: httpx.Client, flow_run: dict[str, Any]) -> dict[str, Any]:
    """Retry a flow run that has ended; wait for its end."""
    press_retry(api, flow_run["id"])
    return wait_for_end(api, flow_run["id"])


def press_retry(api: httpx.Client, flow_run: str) -> None:
    """Send what the button *Retry* of Prefect's UI sends."""
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    answer = api.post(f"/flow_runs/{flow_run}/set_state", json={"state": state, "force": False})
    assert answer.json()["status"] == "ACCEPT", answer.text
