"""Runs that workers train: by which deployment, which are taken up, and what ends them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed

from ratchet.adapters.errors import UserError
from ratchet.flows.recipe.loading import changed_recipe
from ratchet.flows.recipe.plan import SweepRecipe
from ratchet.flows.server import deployed_runs
from ratchet.flows.server.deployed_runs import cancel_deployed, choose_deployment, train_deployed
from ratchet.flows.sweep import check_sweep, sweep
from ratchet.tasks.storage.run_folder import RunError
from tests.support.processes import wait_until
from tests.support.runs.small_recipe import small_recipe

Deploy = Callable[..., None]


@pytest.fixture
def flow(run_shown: None) -> str:
    """Name of a flow that has no deployment, and of its work pool."""
    return f"flow-{uuid4().hex}"


@pytest.fixture
def deploy(flow: str) -> Deploy:
    def deploy(
        name: str, limit: int | None = None, pool: str | None = flow, of: str = flow
    ) -> None:
        with get_client(sync_client=True) as client:
            id = client.create_flow_from_name(of)
            client.create_deployment(id, name, work_pool_name=pool, concurrency_limit=limit)

    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=flow, type="process"))
    return deploy


def begin_worker(pool: str) -> None:
    with get_client(sync_client=True) as client:
        client.send_worker_heartbeat(pool, "worker", heartbeat_interval_seconds=30)


def test_runs_at_once_need_a_server() -> None:
    base = small_recipe().model_dump(mode="json")
    values = {"flow": "sweep", "base": base, "grid": {"steps": [1, 2]}, "at_once": 2}
    recipe = changed_recipe(values, (), SweepRecipe)
    with (
        temporary_settings({PREFECT_API_URL: None}),
        pytest.raises(UserError, match=r"at_once 2 needs workers .* none is set; start `ratchet s"),
    ):
        check_sweep(recipe, "x")


def test_a_flow_without_a_deployment_is_refused(flow: str, deploy: Deploy) -> None:
    with pytest.raises(UserError, match=f"no deployment of the flow {flow}, .*; add it to prefe"):
        choose_deployment(flow, 2, None, None)
    deploy("one")
    with pytest.raises(UserError, match=f"no deployment two of the flow {flow}, by which"):
        choose_deployment(flow, 2, "two", None)


def test_a_work_pool_without_a_worker_is_refused(flow: str, deploy: Deploy) -> None:
    deploy("one")
    with pytest.raises(UserError, match=f"no worker looks for flow runs of {flow}/one; start"):
        choose_deployment(flow, 2, None, None)
    begin_worker(flow)
    assert choose_deployment(flow, 2, None, None).name == f"{flow}/one"


def test_a_deployment_that_nothing_serves_is_refused(flow: str, deploy: Deploy) -> None:
    deploy("one", pool=None)
    with pytest.raises(UserError, match=f"nothing serves {flow}/one; start the program"):
        choose_deployment(flow, 2, None, None)


def test_fewer_flow_runs_at_a_time_than_are_wanted_are_refused(flow: str, deploy: Deploy) -> None:
    deploy("one", limit=1)
    begin_worker(flow)
    with pytest.raises(UserError, match=f"{flow}/one has at most 1 flow run at a time, and at_o"):
        choose_deployment(flow, 2, None, None)
    deploy("two")
    assert choose_deployment(flow, 3, None, None).name == f"{flow}/two"


def test_the_named_one_comes_before_the_base_s_and_that_before_the_others(
    flow: str, deploy: Deploy
) -> None:
    for name in ("a", "b", "c"):
        deploy(name)
    begin_worker(flow)
    chosen = [
        choose_deployment(flow, 2, named, preferred).name
        for named, preferred in [(None, None), (None, "b"), ("c", "b"), (f"{flow}/c", None)]
    ]
    assert chosen == [f"{flow}/{name}" for name in "abcc"]


@pytest.fixture
def runs(flow: str, deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of three runs, of which flow runs of a deployment are looked for again and again."""
    monkeypatch.setattr(deployed_runs, "RUN_LOOK_SECONDS", 0.1)
    deploy("one")
    begin_worker(flow)
    return [f"{flow}-{number}" for number in range(3)]


def train(flow: str, runs: list[str], at_once: int = 2) -> dict[str, str]:
    chosen = choose_deployment(flow, at_once, None, None)
    return dict(train_deployed({name: {"run": name} for name in runs}, chosen, at_once))


def begin(flow: str, name: str, run: str | None = None) -> UUID:
    """Schedule a flow run of the deployment, as a sweep did that was killed since."""
    with get_client(sync_client=True) as client:
        chosen = choose_deployment(flow, 2, None, None)
        parameters = {"run": run or name}
        return client.create_flow_run_from_deployment(
            chosen.id, name=name, parameters=parameters
        ).id


def delete(client: SyncPrefectClient, flow_run: UUID) -> None:
    with suppress(ObjectNotFound):  # the client asks again where the server was too busy to answer
        client.delete_flow_run(flow_run)


def test_a_flow_run_that_is_under_way_is_waited_for_and_none_is_begun_beside_it(
    flow: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [begin(flow, run) for run in runs]
    with get_client(sync_client=True) as client:
        ends = iter(
            [
                lambda: client.set_flow_run_state(ids[0], Completed(), force=True),
                lambda: client.set_flow_run_state(ids[1], Cancelled(message="stop"), force=True),
                lambda: delete(client, ids[2]),
            ]
        )
        between_looks = SimpleNamespace(sleep=lambda seconds: next(ends)())
        monkeypatch.setattr(deployed_runs, "time", between_looks)
        errors = train(flow, runs)
        assert errors == dict(zip(runs, ["", "stop", "its flow run was deleted"], strict=True))
        names = FlowRunFilter(name=FlowRunFilterName(any_=runs))
        left = client.read_flow_runs(flow_run_filter=names)
        assert {one.id for one in left} == {*ids[:2]}


def test_a_flow_run_of_the_same_name_with_other_parameters_is_refused(
    flow: str, runs: list[str]
) -> None:
    begin(flow, runs[0], "another")
    with pytest.raises(UserError, match=f"flow run {runs[0]} .* is under way with other param"):
        train(flow, runs)


def test_flow_runs_that_have_not_ended_are_cancelled(flow: str, runs: list[str]) -> None:
    ids = [begin(flow, run) for run in runs]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(ids[0], Completed(), force=True)
        cancel_deployed(runs)
        states = [client.read_flow_run(id).state for id in ids]
    assert [state.type.value for state in states if state] == ["COMPLETED", *["CANCELLED"] * 2]


@pytest.mark.story
@pytest.mark.usefixtures("root", "no_tinker")
def test_a_run_that_a_worker_has_trained_in_another_folder_stops_the_sweep(
    flow: str, deploy: Deploy
) -> None:
    deploy(flow, of="train")
    begin_worker(flow)
    base, trained = small_recipe().model_dump(mode="json"), f"{flow}-seed1"
    values = {"base": base, "grid": {"seed": [1, 2]}, "at_once": 2, "deployment": f"train/{flow}"}
    wanted = FlowRunFilter(name=FlowRunFilterName(any_=[trained]))

    def complete() -> None:
        with get_client(sync_client=True) as client:
            find = partial(client.read_flow_runs, flow_run_filter=wanted)
            wait_until("the flow run is begun", lambda: bool(find()))
            client.set_flow_run_state(find()[0].id, Completed(), force=True)

    with ThreadPoolExecutor() as threads:
        completing = threads.submit(complete)
        with pytest.raises(RunError, match=f"{trained} by train/{flow}, .* does not have all of"):
            sweep(SweepRecipe.model_validate(values), run=flow)
        completing.result()
