"""Flow runs that wait on a Prefect server until a larger budget is approved."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import check_listener

TRAINING_FLOWS = ("train", "finetune", "prefer", "replay", "stages", "sweep")
"""Flows whose flow runs train a run."""

SOON = timedelta(minutes=1)
"""Flow runs that are scheduled further ahead than this are ignored."""


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
        flow_filter=FlowFilter(name=FlowFilterName(any_=[*TRAINING_FLOWS])),
        flow_run_filter=FlowRunFilter(name=name, expected_start_time=before),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )
