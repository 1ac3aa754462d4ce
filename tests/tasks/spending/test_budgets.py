"""Budgets: a run that has spent its own stops between two steps, and goes on with a larger one."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.flows.opening.checks import check_run
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.server.deployed_runs import resume_waiting
from ratchet.flows.stages import stages
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.settings.run import Budget
from ratchet.tasks.spending.ledger import (
    REPEATED,
    TOKEN_KINDS,
    grant,
    measure_budget,
    read_ledger,
    read_limits,
    sum_spent,
)
from ratchet.tasks.spending.work_log import read_grant
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.plan_record import PlanRecord, write_plan
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.processes import wait_until
from tests.support.runs.finetuned import RECIPE as TEXTS
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import differences, fixture_of

NO_PRICE = r"local/tiny-chat has no price: name a file that has it by RATCHET_PRICES, or give"


def limited(**budget: float) -> Recipe:
    return small_recipe(steps=3, checkpoints={"every": 3}, budget=budget)


whole = fixture_of(limited())


def steps_of(run: RunFolder) -> int:
    return len(read_metrics(run.metrics))


def test_a_run_stops_after_the_step_that_spends_its_budget_and_goes_on_with_a_larger_one(
    whole: RunFolder, root: Path
) -> None:
    recipe = limited(tokens=1)
    with pytest.raises(UserError, match=r"budget.tokens 1, and stops; `ratchet resume one"):
        train(recipe, run="one")
    run = folder_of("one")
    assert steps_of(run) == 1
    with pytest.raises(UserError):  # the same budget allows no further step
        train(recipe, run="one")
    assert steps_of(run) == 1
    assert Ledger(run.checkpoints(POLICY)).at(1).state is not None
    grant(run, read_limits(["tokens=1e9"]))
    train(recipe, run="one")
    assert differences(run, whole) == []
    assert REPEATED not in {row.use for row in read_ledger(run).rows}


def test_steps_and_the_end_of_a_run_record_all_that_its_ledger_has(whole: RunFolder) -> None:
    tokens, spent = read_ledger(whole).tokens(answered=True), sum_spent(whole)
    assert {kind: spent[kind] for kind in TOKEN_KINDS} == tokens


@pytest.fixture
def prices(tmp_path: Path) -> str:
    """A file of prices, which has the tiny model's."""
    row = {"tinker_id": "local/tiny-chat", "prefill": 1, "sample": 1, "train": 1000}
    (file := tmp_path / "prices.json").write_text(json.dumps([row]))
    return str(file)


def test_a_budget_in_dollars_needs_a_price(
    monkeypatch: pytest.MonkeyPatch, prices: str, root: Path
) -> None:
    with pytest.raises(UserError, match=NO_PRICE):
        check_run(limited(usd=1), folder_of("priced"))
    monkeypatch.setenv("RATCHET_PRICES", prices)
    with pytest.raises(UserError, match=r"\$\d+\.\d\d of budget.usd \$0\.10"):
        train(limited(usd=0.1), run="priced")
    spent = measure_budget(folder_of("priced"), Budget(usd=0.1))
    assert spent.share == pytest.approx(sum_spent(folder_of("priced"))["usd"] / 0.1)


def begin(name: str, base: str) -> RunFolder:
    """Make a run of a model, which has done nothing yet."""
    recipe = limited(tokens=1).model_dump(mode="json")
    recipe["model"]["base"] = base
    write_manifest(run := folder_of(name), recipe, "f00d")
    return run


@pytest.mark.usefixtures("root")
def test_a_command_gives_dollars_to_no_run_if_one_has_no_price() -> None:
    runs = [begin("sweep-a", "Qwen/Qwen3-8B"), begin("sweep-b", "local/tiny-chat")]
    write_plan(folder_of("sweep"), PlanRecord({}, [run.name for run in runs], "reward"))
    for named in ("sweep", "sweep-b"):
        with pytest.raises(UserError, match=NO_PRICE):
            CliRunner().invoke(app, ["resume", named, "--budget", "usd=5"], catch_exceptions=False)
    assert [read_grant(run) for run in runs] == [{}, {}]
    assert not any(run.work.exists() for run in runs)


@pytest.mark.usefixtures("root", "no_tinker")
def test_dollars_that_were_given_need_their_price_until_the_end(
    monkeypatch: pytest.MonkeyPatch, prices: str
) -> None:
    recipe, run = limited(tokens=1), begin("given", limited().model.base)
    with monkeypatch.context() as patch:
        patch.setenv("RATCHET_PRICES", prices)
        grant(run, {"usd": 5})
        check_run(recipe, run)
    assert read_grant(run) == {"usd": 5}
    with pytest.raises(UserError, match=NO_PRICE):
        check_run(recipe, run)


@dataclass
class Deployed:
    """A deployment of the flow that trains, whose flow runs are played here as by a worker."""

    client: SyncPrefectClient
    id: UUID

    def create(self, recipe: Recipe, run: str) -> UUID:
        given = {"recipe": recipe.model_dump(mode="json"), "run": run}
        return self.client.create_flow_run_from_deployment(self.id, parameters=given).id

    def play(self, id: UUID) -> str:
        """Play a flow run until it ends or is suspended; return the name of its state."""
        flow_run = self.client.read_flow_run(id)
        parameters = train.validate_parameters(flow_run.parameters)
        with suppress(Pause):  # with which the process of a suspended flow run ends
            run_flow(train, flow_run=flow_run, parameters=parameters, return_type="state")
        return self.state_of(id)

    def resume(self, id: UUID, **given: float) -> SetStateStatus:
        return self.client.resume_flow_run(id, run_input=given).status

    def state_of(self, id: UUID) -> str:
        state = self.client.read_flow_run(id).state
        assert state is not None
        return state.name or state.type.value


@pytest.fixture
def deployed(root: Path) -> Iterator[Deployed]:
    """Deploy the flow that trains, with one flow run at a time, to the server of the tests."""
    with get_client(sync_client=True) as client:
        flow = client.create_flow(train)
        made = client.create_deployment(flow, f"limited-{root.parent.name}", concurrency_limit=1)
        yield Deployed(client, made)


@pytest.mark.parametrize("is_priced", [True, False])
def test_the_form_of_a_run_that_waits_has_dollars_if_its_model_has_a_price(
    is_priced: bool, deployed: Deployed, monkeypatch: pytest.MonkeyPatch, prices: str
) -> None:
    own, larger = ({"usd": 1e-6}, {"usd": 5}) if is_priced else ({"tokens": 1}, {"tokens": 10**9})
    if is_priced:
        monkeypatch.setenv("RATCHET_PRICES", prices)
    run = folder_of(f"form-{is_priced}")
    waiting = deployed.create(limited(**own), run.name)
    assert deployed.play(waiting) == "Suspended"
    refused, accepted = SetStateStatus.REJECT, SetStateStatus.ACCEPT
    assert deployed.resume(waiting, usd=-5) == refused
    if not is_priced:
        assert deployed.resume(waiting, tokens=10**9, usd=5) == refused
    assert deployed.resume(waiting, **larger) == accepted
    assert deployed.play(waiting) == "Completed"
    assert read_grant(run) == larger


def test_most_of_a_budget_is_told_once(
    root: Path, whole: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    steps = read_metrics(whole.metrics)[:2]
    spent = sum(row[f"spent/{kind}"] for row in steps for kind in TOKEN_KINDS)
    tokens = int(spent / 0.9)
    train(limited(tokens=tokens), run="told")
    told = [record for record in caplog.messages if "of budget.tokens" in record]
    assert len(told) == 1


@pytest.mark.parametrize("given", ["foo=1", "usd", "usd=-1", "tokens=many", "tokens=0"])
def test_what_is_no_budget_is_refused_with_the_keys_that_there_are(given: str) -> None:
    with pytest.raises(UserError, match="give usd or tokens with a number above 0"):
        read_limits([given])


def test_a_deployed_run_waits_for_approval_and_goes_on_as_if_it_had_not(
    whole: RunFolder, deployed: Deployed
) -> None:
    tokens = int(sum(read_ledger(whole).tokens(answered=True).values()) * 0.55)
    waiting = deployed.create(limited(tokens=tokens), "approved")
    assert deployed.play(waiting) == "Suspended"
    state = deployed.client.read_flow_run(waiting).state
    assert state is not None
    said = r"approved has spent .* of budget.tokens .*; `ratchet resume approved --budget .*"
    assert re.fullmatch(said, str(state.message))
    facts = read_facts(folder_of("approved"))
    assert facts.state(is_open=False) == "stopped, its budget is spent"
    assert resume_waiting("approved")
    assert deployed.play(waiting) == "Completed"
    assert read_grant(folder_of("approved")) == {"tokens": 2 * tokens}
    assert differences(folder_of("approved"), whole) == []


def test_a_run_waits_again_in_every_process_that_plays_it(deployed: Deployed) -> None:
    waiting = deployed.create(limited(tokens=1), "again")
    for limit in (2, 3):  # which the run has spent already
        assert deployed.play(waiting) == "Suspended"
        assert deployed.resume(waiting, tokens=limit) == SetStateStatus.ACCEPT
        assert steps_of(folder_of("again")) == 1
    assert deployed.play(waiting) == "Suspended"
    assert read_grant(folder_of("again")) == {"tokens": 3}
    grant(folder_of("again"), {"tokens": 10**9})
    assert resume_waiting("again")
    assert deployed.play(waiting) == "Completed"
    assert steps_of(folder_of("again")) == 3


@pytest.mark.usefixtures("root", "no_tinker", "prefect_server")
def test_a_stage_of_a_deployed_flow_run_is_paused_and_goes_on() -> None:
    """Prefect suspends no flow run that another one plays."""
    texts = TEXTS.model_copy(update={"budget": Budget(tokens=600), "steps": 2}).model_dump(
        mode="json"
    )
    one = {"name": "texts", "flow": "finetune", "recipe": texts}
    recipe = StagesRecipe.model_validate({"stages": [one]})
    stage = "staged-1-texts"
    with get_client(sync_client=True) as client, ThreadPoolExecutor(1) as people:
        made = client.create_deployment(client.create_flow(stages), "staged", concurrency_limit=1)
        given = {"recipe": recipe.model_dump(mode="json"), "run": "staged"}
        created = client.create_flow_run_from_deployment(made, parameters=given)
        approved = people.submit(wait_until, "a pause of the stage", lambda: resume_waiting(stage))
        parameters = stages.validate_parameters(given)
        ended = run_flow(stages, flow_run=created, parameters=parameters, return_type="state")
        assert approved.result() > 0
    assert cast(State, ended).is_completed()
    assert read_grant(folder_of(stage)) == {"tokens": 1200}
