"""Flow runs of a Prefect server → what `ratchet watch` shows of a run without a folder here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from json import loads
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL

from adapters.errors import UserError, did_you_mean
from adapters.network.addresses import check_listener
from adapters.process.terminal import on_one_line
from tasks.reports.progress import CALLS_MEASURE, Said, WatchedRun, describe_run
from tasks.storage.run_folder import all_runs, runs_root
from tasks.tracking.prefect_pages import NOW_ARTIFACT, artifact_key

WATCHED_FLOWS = ("train", "finetune", "prefer", "replay", "stages", "sweep")
"""Flows whose flow runs train a run."""

SOON = timedelta(minutes=1)
"""Flow runs that are scheduled further ahead than this are ignored."""


@contextmanager
def open_server_run(run: str) -> Iterator[Callable[[], WatchedRun]]:
    """Yield the function that looks at the newest flow run of a run that has no folder here.

    UserError if no server is set, if it cannot be reached, or if it knows no such flow run.
    """
    address = PREFECT_API_URL.value()
    here = f"there is no run {run} in {runs_root()}"
    if not address:
        near = did_you_mean(run, (other.name for other in all_runs()))
        raise UserError(
            f"{here}, and no Prefect server is set; `ratchet runs` lists those there are, and "
            f"PREFECT_API_URL names the server of a run on another machine{near}"
        )
    try:
        check_listener(address)
        with get_client(sync_client=True) as client:
            found = _find_flow_run(client, run)
            if found is not None:
                yield lambda: _look(client, run, found)
                return
            known = [other.name for other in [*_newest_flow_runs(client), *all_runs()]]
    except (OSError, ValueError, httpx.HTTPError, PrefectException) as error:
        raise UserError(
            f"{here}, and the Prefect server at {address} cannot be asked for it ({error}); start "
            "the server, or mend PREFECT_API_URL"
        ) from error
    raise UserError(
        f"{here}, and the Prefect server at {address} has no flow run of that name; `ratchet runs` "
        f"and `prefect flow-run ls` list those there are{did_you_mean(run, known)}"
    )


def resume_waiting(run: str) -> bool:
    """Have the flow run of a run go on if it waits for approval; return whether it did.

    UserError if the server that is set does not answer.
    """
    if not (address := PREFECT_API_URL.value()):
        return False
    try:
        check_listener(address)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the Prefect server at {address}, where {run} may wait, cannot be reached ({error}); "
            "start it, or unset PREFECT_API_URL to go on here"
        ) from error
    with get_client(sync_client=True) as client:
        found = _find_flow_run(client, run)
        if found is None or (state := client.read_flow_run(found).state) is None:
            return False
        if state.is_paused():
            client.resume_flow_run(found, run_input={})
        return state.is_paused()


def _find_flow_run(client: SyncPrefectClient, run: str) -> UUID | None:
    """Find the newest flow run of a run.

    A flow run that has begun has the run's name; before, its parameter `run` has it.
    """
    newest = _newest_flow_runs(client)
    found = [one for one in newest if one.parameters.get("run") == run]
    found += _newest_flow_runs(client, FlowRunFilterName(any_=[run]))[:1]
    last = max(found, key=lambda one: one.created or datetime.min.replace(tzinfo=UTC), default=None)
    return last.id if last else None


def _newest_flow_runs(
    client: SyncPrefectClient, name: FlowRunFilterName | None = None
) -> list[FlowRun]:
    """Read the newest flow runs, as many as the server lists at once."""
    before = FlowRunFilterExpectedStartTime.model_validate({"before_": datetime.now(UTC) + SOON})
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[*WATCHED_FLOWS])),
        flow_run_filter=FlowRunFilter(name=name, expected_start_time=before),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )


def _look(client: SyncPrefectClient, run: str, id: UUID) -> WatchedRun:
    """Read the state of a flow run, and the artifact that says what the run does."""
    flow_run, facts = client.read_flow_run(id), _read_facts(client, run, id)
    state = flow_run.state
    if state is None:
        return WatchedRun(describe_run(run, "has no state yet", facts, is_open=False))
    said = (state.name or state.type.value).lower()
    if state.is_final() and state.message:
        said += f": {on_one_line(state.message)}"
    elif state.is_running() and CALLS_MEASURE in facts:
        said += f", {facts[CALLS_MEASURE]}"
    failed = state.is_final() and not state.is_completed()
    lines = describe_run(run, said, facts, is_open=state.is_running())
    if failed:
        lines = "\n".join([lines, *_ways_on(run, flow_run)])
    return WatchedRun(lines, state.is_final(), failed)


def _ways_on(run: str, flow_run: FlowRun) -> list[str]:
    """Name the commands that continue a run whose flow run has failed, or was cancelled."""
    ways = [f"`ratchet resume {run}` goes on, on the machine of its folder"]
    if flow_run.deployment_id is not None:
        ways.append(f"`prefect flow-run retry {flow_run.id}` has a worker go on")
    return ways


def _read_facts(client: SyncPrefectClient, run: str, id: UUID) -> Said:
    """Read the newest facts that a run has published; empty before the first."""
    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            key=ArtifactFilterKey(any_=[artifact_key(run, NOW_ARTIFACT)]),
            flow_run_id=ArtifactFilterFlowRunId(any_=[id]),
        ),
        sort=ArtifactSort.UPDATED_DESC,
        limit=1,
    )
    rows = loads(str(found[0].data)) if found else []
    return {row["what"]: on_one_line(row[NOW_ARTIFACT]) for row in rows}
