"""Runs that workers of a Prefect server train, `at_once` at a time, each a deployment's flow run.

A flow run outlives the process that waits for it. A process that waits again takes over the flow
runs that are under way, since two flow runs of one run would lock each other out of its folder.
Others wait on the server until a larger budget is approved.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import (
    TERMINAL_STATES,
    DeploymentStatus,
    FlowRun,
    State,
    StateType,
    WorkerStatus,
)
from prefect.client.schemas.responses import DeploymentResponse, SetStateStatus
from prefect.client.schemas.sorting import DeploymentSort, FlowRunSort
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.clock import Wait
from ratchet.flows.recipe.loading import ENTRYPOINTS
from ratchet.flows.server.prefect_startup import check_prefect, check_server

RUN_LOOK_SECONDS = 2.0
SILENT_SECONDS = 300.0
"""Time in which a server that is away may come back."""
RAISED = "Flow run encountered an exception: "
"""Beginning of the message of a state that an error has ended."""
NOT_BEGUN = {StateType.SCHEDULED, StateType.PENDING}

Parameters = Mapping[str, Any]
"""Parameters of a flow run, the recipe among them."""
TRAINING_FLOWS = FlowFilter(name=FlowFilterName(any_=[*ENTRYPOINTS.values(), "replay"]))
"""Filter of the flows whose flow runs train a run."""


@dataclass(frozen=True)
class Deployment:
    """A deployment on the server, by its whole name, FLOW/NAME."""

    name: str
    id: UUID


def choose_deployment(
    flow: str, at_once: int, named: str | None, preferred: str | None
) -> Deployment:
    """Return the deployment of a flow of which workers run `at_once` flow runs at the same time.

    It is the one that is named, by FLOW/NAME or NAME. If none is, it is the preferred one, or else
    the first by its name that can be run so. UserError if there is none.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise UserError(
            f"at_once {at_once} needs workers of a Prefect server, and none is set; start `ratchet "
            "server`, `ratchet deploy` and `ratchet worker` and name the server by "
            "PREFECT_API_URL, or leave at_once out"
        )
    check_prefect()
    of_flow = FlowFilter(name=FlowFilterName(any_=[flow]))
    with get_client(sync_client=True) as client:
        found = client.read_deployments(flow_filter=of_flow, sort=DeploymentSort.NAME_ASC)
        known = {f"{flow}/{one.name}": one for one in found}
        if named is not None:
            known = {name: one for name, one in known.items() if named in (name, one.name)}
        refusals = list[str]()
        for name in sorted(known, key=lambda name: name != f"{flow}/{preferred}"):
            refusals.append(_refusal(client, name, known[name], at_once))
            if not refusals[-1]:
                return Deployment(name, known[name].id)
    missing = (
        f"deployment {named} of the flow {flow}" if named else f"deployment of the flow {flow}"
    )
    absent = (
        f"the Prefect server at {url} has no {missing}, by which its workers would train the runs; "
        "add it to prefect.yaml and give `ratchet deploy`, or leave at_once out"
    )
    raise UserError(refusals[0] if refusals else absent)


def _refusal(client: SyncPrefectClient, name: str, one: DeploymentResponse, at_once: int) -> str:
    """Say why `at_once` flow runs of a deployment would not run at the same time; empty if not."""
    limit, pool = one.global_concurrency_limit, one.work_pool_name
    if limit is not None and limit.active and limit.limit < at_once:
        return (
            f"{name} has at most {counted(limit.limit, 'flow run')} at a time, and at_once is "
            f"{at_once}; give its concurrency_limit in prefect.yaml as many and deploy it again, "
            "or name another deployment"
        )
    if pool is None:
        served = one.status == DeploymentStatus.READY
        return "" if served else f"nothing serves {name}; start the program that does"
    workers = client.read_workers_for_work_pool(pool)
    if all(worker.status != WorkerStatus.ONLINE for worker in workers):
        return f"no worker looks for flow runs of {name}; start one: `ratchet worker`"
    return ""


def train_deployed(
    runs: Mapping[str, Parameters], deployment: Deployment, at_once: int
) -> Iterator[tuple[str, str]]:
    """Train runs, which are given by name, as flow runs of a deployment, `at_once` at a time.

    Yields the name of each that has ended, and why it failed, or nothing.
    """
    with get_client(sync_client=True) as client:
        under_way = _under_way(client, runs)
        left = [name for name in runs if name not in under_way]
        wait = None
        while left or under_way:
            while left and len(under_way) < at_once:
                name = left.pop(0)
                under_way[name] = _begin(deployment, name, runs[name])
            time.sleep(RUN_LOOK_SECONDS)
            found = _look(client, under_way)
            for name, flow_run in found.items():
                if flow_run is None or _type(flow_run) in TERMINAL_STATES:
                    del under_way[name]
                    yield name, _error(flow_run)
            idle = [name for name in under_way if _type(found[name]) in NOT_BEGUN]
            wait = (wait or Wait("a worker to begin", None)) if idle else None
            if wait is not None:
                wait.speak(f": {', '.join(idle)}, of {deployment.name}")


def cancel_deployed(runs: Collection[str]) -> None:
    """Cancel the flow runs of runs that workers have begun, or will."""
    with get_client(sync_client=True) as client:
        for one in _deployed(client, runs):
            client.set_flow_run_state(one.id, Cancelling())


def check_under_way(runs: Mapping[str, Parameters]) -> None:
    """Refuse (UserError) runs of which workers have begun one, or will, with other parameters."""
    with get_client(sync_client=True) as client:
        _under_way(client, runs)


def _under_way(client: SyncPrefectClient, runs: Mapping[str, Parameters]) -> dict[str, UUID]:
    """Map runs that workers have begun, or will, to flow runs; UserError if parameters differ."""
    found = _deployed(client, runs)
    for one in found:
        if any(one.parameters.get(key) != value for key, value in runs[one.name].items()):
            raise UserError(
                f"the flow run {one.name} ({one.id}) is under way with other parameters; cancel it "
                "in Prefect's UI, or give the sweep another name"
            )
    return {one.name: one.id for one in found}


def _deployed(client: SyncPrefectClient, runs: Collection[str]) -> list[FlowRun]:
    """List the flow runs of runs that have a deployment, and have not ended.

    A flow run without a deployment has no worker to report that its process has died.
    """
    not_ended = FlowRunFilterStateType(not_any_=sorted(TERMINAL_STATES))
    wanted = FlowRunFilter(
        name=FlowRunFilterName(any_=[*runs]), state=FlowRunFilterState(type=not_ended)
    )
    found = client.read_flow_runs(flow_run_filter=wanted)
    return [one for one in found if one.deployment_id is not None]


def _begin(deployment: Deployment, name: str, parameters: Parameters) -> UUID:
    """Have a worker begin a run, once, even if Prefect's client repeats the request."""
    flow_run = run_deployment(
        deployment.id,
        parameters=dict(parameters),
        flow_run_name=name,
        timeout=0,
        idempotency_key=uuid4().hex,
    )
    return cast(FlowRun, flow_run).id


@retry(
    retry=retry_if_exception_type(httpx.TransportError),
    stop=stop_after_delay(SILENT_SECONDS),
    wait=wait_fixed(RUN_LOOK_SECONDS),
    reraise=True,
)
def _look(client: SyncPrefectClient, under_way: Mapping[str, UUID]) -> dict[str, FlowRun | None]:
    """Read the flow runs of some runs; None where somebody has deleted one."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[*under_way.values()]))
    found = {one.id: one for one in client.read_flow_runs(flow_run_filter=wanted)}
    return {name: found.get(id) for name, id in under_way.items()}


def _type(flow_run: FlowRun | None) -> StateType | None:
    return None if flow_run is None or flow_run.state is None else flow_run.state.type


def _error(flow_run: FlowRun | None) -> str:
    if flow_run is None or flow_run.state is None:
        return "its flow run was deleted"
    return describe_failure(flow_run.state)


def describe_failure(state: State[Any]) -> str:
    """Say why a flow run with this last state failed; empty if it did not."""
    if state.is_completed():
        return ""
    return (state.message or state.name or "failed").removeprefix(RAISED)


def delete_flow_runs(runs: Collection[str], opened: Collection[str]) -> None:
    """Delete the flow runs of runs: of those of their names, each in which one was `opened`.

    The flow runs of another project's runs of these names had other ones open.
    """
    times = [datetime.strptime(f"{at}+0000", "%Y-%m-%d %H:%M:%S UTC%z") for at in opened]
    with get_client(sync_client=True) as client:
        for name in runs:
            named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
            for one in client.read_flow_runs(flow_filter=TRAINING_FLOWS, flow_run_filter=named):
                begun, ended = one.start_time, one.end_time or datetime.now(UTC)
                if begun and any(begun - timedelta(seconds=1) <= at <= ended for at in times):
                    client.delete_flow_run(one.id)


def resume_waiting(run: str) -> bool:
    """Have the flow run of a run go on if it waits for approval; return whether it did.

    UserError if the server that is set does not answer.
    """
    if not (address := PREFECT_API_URL.value()):
        return False
    check_server(address, f"unset PREFECT_API_URL: {run}, which may wait there, goes on here")
    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    waiting = FlowRunFilter(name=FlowRunFilterName(any_=[run]), state=paused)
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_filter=TRAINING_FLOWS,
            flow_run_filter=waiting,
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=1,
        )
        # Refused while the form of its input is not saved yet, which comes after the state.
        said = [client.resume_flow_run(one.id, run_input={}).status for one in found]
    return SetStateStatus.ACCEPT in said
