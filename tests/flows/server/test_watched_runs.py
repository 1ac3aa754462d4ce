"""`ratchet watch` shows a run of another machine by what a Prefect server knows of it."""

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed
from typer.testing import CliRunner, Result

from adapters.errors import UserError
from adapters.player_protocol import Failure
from flows.cli.commands import app
from flows.recipe.recipe import Recipe
from flows.server.watched_runs import open_server_run
from flows.train import train
from tasks.recording.journal import Journal
from tasks.recording.step_log import record_metrics
from tasks.rollouts import StepStopped
from tasks.storage.files import write_rows
from tasks.storage.manifest import write_manifest
from tasks.storage.plan_record import PlanRecord, write_plan
from tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address
from tests.tasks.test_artifacts import shown
from tests.tasks.test_journal import ended

NOW = datetime.now(UTC)
SMALL = {"rollouts": {"groups": 2, "group_size": 2, "max_tokens": 8}, "evaluation": {"every": 0}}

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")


def fail(example: dict[str, Any], **endpoint: str) -> NoReturn:
    raise KeyError("city")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this machine's folder of runs be empty."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "here"))
    return tmp_path / "elsewhere"


def train_at(root: Path, recipe: Recipe, run: str) -> None:
    """Train a run in another folder of runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        train(recipe, run=run)


def watch(run: str) -> Result:
    return CliRunner().invoke(app, ["watch", run], env={"COLUMNS": "100"})


def test_a_run_that_has_ended_says_its_last_words_and_shows_its_curve(
    elsewhere: Path, tiny_chat: Address
) -> None:
    train_at(elsewhere, small_recipe(steps=2, **SMALL), "watched")
    shown = watch("watched")
    assert shown.exit_code == 0, shown.output
    state, step, held_out, curve, *_ = shown.output.splitlines()
    assert state.startswith("watched: completed: held-out reward ")
    assert step.startswith("done, reward ")
    assert held_out.startswith("held-out ")
    assert curve.startswith("reward by step ")


def test_a_run_that_has_failed_says_why_and_fails(elsewhere: Path, tiny_chat: Address) -> None:
    recipe = small_recipe(agent=f"{__name__}:fail", **SMALL)
    with pytest.raises(StepStopped):
        train_at(elsewhere, recipe, "watched-failing")
    shown = watch("watched-failing")
    assert shown.exit_code == 1
    assert shown.output.startswith("watched-failing: failed: ")
    said = " ".join(shown.output.split())
    assert said.endswith("`ratchet resume watched-failing` goes on, on the machine of its folder")
    assert "4 of the 4 rollouts of train-00000 failed" in said
    assert "KeyError: 'city' at tests/flows" in said


def test_a_run_that_trains_shows_its_step_its_calls_and_its_last_failure(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SECONDS", "UI_LOOK_SECONDS"):
        monkeypatch.setattr(f"tasks.tracking.prefect_pages.{name}", 0.1)
    run = RunFolder(elsewhere / "trains")
    recipe = small_recipe(steps=2, rollouts={"groups": 2, "group_size": 4})
    write_manifest(run, recipe.model_dump(mode="json"), "f00d")
    record_metrics(run.metrics, 0, {"reward/mean": 0.25})
    write_rows(run.shard("train-00001"), [{"example_id": 0, "example": {}, "batch": 0, "round": 0}])
    seen: list[str] = []

    @flow(name="train", flow_run_name="trains")
    def look() -> None:
        with Journal(run.journal("train-00001.0")) as journal, shown(run, 2):
            begun = {"attempt": 0, "role": "policy", "call": 0, "kind": "begun", "started": NOW}
            journal.append_now({"rollout_id": "train-00001-0000-01", "span_id": "1", **begun})
            failure = Failure("KeyError", "'\x1b[2Jcity'")
            journal.append_now(ended("train-00001-0000-00", failure, now=NOW))
            with open_server_run("trains") as look:
                while "in flight" not in (said := look().said):
                    pass
                seen.extend(said.splitlines())

    look()
    assert seen == [
        "trains: running, 1 call in flight",
        "step 2 of 2: 1 of 4 rollouts, reward 0.25",
        "reward by step ▁ 0.25",
        r"last failure: KeyError: '\x1b[2Jcity'",
    ]


def test_a_flow_run_that_has_not_begun_is_found_by_its_parameter() -> None:
    @flow(name="train")
    def waits(run: str) -> Any:
        return Completed(message="it was nothing")

    with get_client(sync_client=True) as client:
        created = client.create_flow_run(waits, parameters={"run": "waits"})
        with open_server_run("waits") as look:
            assert look().said == "waits: pending"
            run_flow(waits, flow_run=created, parameters={"run": "waits"})
            seen = look()
    assert (seen.said, seen.ended, seen.failed) == ("waits: completed: it was nothing", True, False)


def test_a_deployed_run_that_was_cancelled_names_the_retry_that_goes_on() -> None:
    @flow(name="train")
    def ends(run: str) -> None: ...

    with get_client(sync_client=True) as client:
        deployed = client.create_deployment(client.create_flow(ends), name="ends")
        cancelled = client.create_flow_run_from_deployment(
            deployed, parameters={"run": "ends"}, state=Cancelled()
        )
    with open_server_run("ends") as look:
        seen = look()
    state, resume, retry = seen.said.splitlines()
    assert (state, seen.failed) == ("ends: cancelled", True)
    assert resume == "`ratchet resume ends` goes on, on the machine of its folder"
    assert retry == f"`prefect flow-run retry {cancelled.id}` has a worker go on"


def test_a_name_that_neither_this_machine_nor_the_server_has_gets_the_nearest() -> None:
    @flow(name="train", flow_run_name="otter-1")
    def named() -> None: ...

    named()
    with pytest.raises(UserError) as refused, open_server_run("oter-1"):
        pass
    said = str(refused.value)
    assert said.startswith("there is no run oter-1 in ")
    assert f"the Prefect server at {PREFECT_API_URL.value()} has no flow run of that name" in said
    assert said.endswith("; did you mean 'otter-1'?")


def test_a_sweep_of_this_machine_names_its_runs_that_have_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "here" / "sweep")
    write_plan(folder, PlanRecord({}, ["sweep-a", "sweep-b"], "held-out reward"))
    write_manifest(RunFolder(tmp_path / "here" / "sweep-a"), {}, "f00d")
    refused = watch("sweep").exception
    assert isinstance(refused, UserError)
    assert str(refused).endswith("begun are sweep-a")


def test_a_server_that_is_away_is_said_in_a_sentence() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: address}),
            pytest.raises(UserError, match=f"the Prefect server at {address} cannot be asked for"),
            open_server_run("hello-1"),
        ):
            pass


def test_without_a_server_the_sentence_says_how_one_is_named() -> None:
    with (
        temporary_settings({PREFECT_API_URL: None}),
        pytest.raises(UserError, match=r"PREFECT_API_URL names the server of a run on another"),
        open_server_run("hello-1"),
    ):
        pass
