"""A worker of the work pool, which starts a flow run only where its deployment's code is."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, cast

import anyio
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    temporary_settings,
)
from prefect.states import Crashed
from prefect.utilities.processutils import setup_signal_handlers_worker
from prefect.workers.process import ProcessWorker, ProcessWorkerResult

from ratchet.adapters.errors import listed
from ratchet.adapters.process.terminal import show
from ratchet.flows.recipe.loading import OLD_ENTRYPOINT
from ratchet.flows.server.deployments import ELSEWHERE, POOL, client_environment
from ratchet.flows.server.prefect_startup import check_server

IN_FOLDER = "prefect.deployments.steps.set_working_directory"
"""Pull step that names the folder of a deployment's code, which a worker may not have."""


def run_worker() -> None:
    """Run what the work pool has, until a signal ends it; the pool is made if it is not there."""
    variables = client_environment()
    os.environ |= variables  # flow runs inherit it
    check_server(address := variables["PREFECT_API_URL"], ELSEWHERE)
    retried = variables[PREFECT_CLIENT_RETRY_EXTRA_CODES.name]
    with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_RETRY_EXTRA_CODES: retried}):
        _warn_of_older()
        show("the worker runs what is scheduled, until Ctrl-C", sys.stderr)
        worker = ProcessWorker(work_pool_name=POOL)
        cast(Any, worker).run = partial(_run_where_its_code_is, worker)
        setup_signal_handlers_worker(os.getpid(), "the worker", print)
        anyio.run(worker.start)


def _warn_of_older() -> None:
    """Say which deployments of the work pool name a flow as an earlier version did."""
    in_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
    with get_client(sync_client=True) as client:
        found = client.read_deployments(work_pool_filter=in_pool)
    older = [one.name for one in found if OLD_ENTRYPOINT.fullmatch(one.entrypoint or "")]
    if older:
        show(
            f"{listed(older)} on the server: of an earlier version, whose flows this one does not "
            "find; `ratchet deploy NAME` puts each there anew",
            sys.stderr,
        )


async def _run_where_its_code_is(
    worker: ProcessWorker, flow_run: FlowRun, configuration: Any, task_status: Any
) -> ProcessWorkerResult:
    """Run a flow run in its deployment's folder, or crash it in a sentence where there is none."""
    deployment = await worker.client.read_deployment(cast(Any, flow_run.deployment_id))
    own = Path(configuration.working_dir or Path.cwd())
    folder = _code_folder(deployment.pull_steps or (), own)
    if folder is None or folder.is_dir():
        if folder is not None:
            configuration.working_dir = own
        return await ProcessWorker.run(worker, flow_run, configuration, task_status)
    said = (
        f"the worker on {gethostname()} has no folder {folder}, where {deployment.name} has its "
        "code; copy it there, or let the deployment's pull step clone it, or name the worker's own "
        "folder by `directory: .`, and Retry"
    )
    worker.get_flow_run_logger(flow_run).error(said)
    await worker.client.set_flow_run_state(flow_run.id, Crashed(message=said), force=True)
    task_status.started(0)
    return ProcessWorkerResult(status_code=0, identifier="")


def _code_folder(steps: Sequence[Mapping[str, Any]], own: Path) -> Path | None:
    """Return the folder that the first pull step names, seen from a worker's own; None if none."""
    match steps:
        case [{**step}, *_] if IN_FOLDER in step and "{{" not in step[IN_FOLDER]["directory"]:
            return own / Path(step[IN_FOLDER]["directory"]).expanduser()
    return None
