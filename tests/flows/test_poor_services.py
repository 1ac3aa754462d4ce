"""Runs on services that lack something: refused before a rollout, or what it costs is said."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.servers.hello_on_skyrl import equal_steps
from ratchet.adapters.calls import POLICY
from ratchet.adapters.diagnosis import probes
from ratchet.adapters.diagnosis.probes import SERVICE_PROBES
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import ServiceRefused, open_session
from ratchet.flows.cli.commands import app
from ratchet.flows.evaluate import evaluate
from ratchet.flows.recipe.service_needs import probe_service
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.spending.ledger import grant
from ratchet.tasks.storage.files import read_json
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import TINY_CHAT, Address, serving
from tests.support.servers.poor_servers import FAULTS, Fault, PoorServer, poor_server

pytestmark = pytest.mark.usefixtures("prefect_server")

SHORT = {
    "rollouts": {"groups": 2, "group_size": 4, "max_tokens": 16},
    "evaluation": {"examples": 1, "greedy": False},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(TINY_CHAT, tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture
def server(
    engine: Address, root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PoorServer]:
    """Serve the engine with the fault that the test names, or without one."""
    fault = FAULTS[request.param] if hasattr(request, "param") else Fault()
    with poor_server(engine.url, fault) as poor:
        monkeypatch.setenv("TINKER_BASE_URL", poor.url)
        monkeypatch.setenv("TINKER_API_KEY", engine.key)
        yield poor


def with_fault(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", [name], indirect=True)


def probed(server: PoorServer, engine: Address, name: str, **changes: Any) -> RunFolder:
    """Probe what a small recipe needs of the server, as a run does before its first rollout."""
    run = folder_of(name)
    run.path.mkdir(parents=True, exist_ok=True)
    with open_session(TinkerServer(server.url, engine.key, Future(), None), 60.0) as service:
        probe_service(small_recipe(**SHORT, **changes), run, service)
    return run


def test_a_service_is_probed_once_and_recorded(server: PoorServer, engine: Address) -> None:
    train(small_recipe(**SHORT, steps=1), run="probed")
    run = folder_of("probed")
    recorded = read_json(run.service)
    assert recorded["url"] == server.url
    assert {one["verdict"] for one in recorded["findings"]} == {"offers"}
    assert 0 < recorded["tokens"] <= 1000
    work = [json.loads(line) for line in run.work.read_text().splitlines()]
    assert sum(row.get("trained", 0) for row in work if row.get("task") == "diagnosis") > 0

    server.asked.clear()
    probed(server, engine, "probed")
    assert "create_model" not in server.asked


def test_hosted_tinker_whose_fields_are_those_of_the_api_is_probed_for_its_precision_alone(
    server: PoorServer, engine: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_BASE_URL")
    recorded = read_json(probed(server, engine, "hosted").service)
    assert recorded["url"] == "hosted Tinker"
    assert [one["name"] for one in recorded["findings"]] == ["logprobs", "company"]


@with_fault("ignores grad_clip_norm")
def test_a_run_whose_key_a_service_does_not_honour_is_refused_before_a_rollout(
    server: PoorServer, engine: Address
) -> None:
    clipped = {"optimizer": {"learning_rate": 0.005, "grad_clip_norm": 0.5}}
    with pytest.raises(ServiceRefused) as refused:
        train(small_recipe(**SHORT, **clipped), run="clipped")
    assert "does not honour grad_clip_norm, which optimizer.grad_clip_norm 0.5 needs" in str(
        refused.value
    )
    assert not folder_of("clipped").exists()
    probed(server, engine, "unclipped")


@with_fault("names no sampled sequences")
def test_a_service_whose_answers_the_sdk_cannot_read_is_named_before_a_rollout(
    server: PoorServer, engine: Address
) -> None:
    with pytest.raises(ServiceRefused, match=r"cannot train this recipe: .*breaks the wire"):
        probed(server, engine, "unread")


@with_fault("knows no end of a session")
def test_a_run_on_a_service_without_an_end_of_sessions_says_so(
    server: PoorServer, engine: Address, caplog: pytest.LogCaptureFixture
) -> None:
    probed(server, engine, "endless")
    assert "lacks end of a session" in caplog.text


@pytest.mark.story
@with_fault("ignores seeds")
def test_a_run_on_a_service_without_seeds_says_that_no_other_run_repeats_it(
    server: PoorServer, caplog: pytest.LogCaptureFixture
) -> None:
    summary = train(small_recipe(**SHORT, steps=1), run="unseeded")
    assert not summary.reproducible
    assert "does not honour seeds, which seed 0 needs" in caplog.text


@pytest.mark.story
@with_fault("loads no optimizer")
@pytest.mark.usefixtures("server")
def test_a_run_that_stopped_on_a_service_without_optimizers_goes_on_as_if_it_had_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = folder_of(train(small_recipe(**SHORT, steps=3), run="straight").run)
    assert "a crash applies the recorded datums of every step again" in caplog.text
    assert [one.step for one in Ledger(whole.checkpoints(POLICY)).states(99)] == [0]
    assert equal_steps(stopped_and_resumed("stopped"), whole) == 3


@pytest.mark.story
@with_fault("forgets weights with their session")
@pytest.mark.usefixtures("server")
def test_a_run_makes_weights_again_that_a_service_has_forgotten_with_their_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = folder_of(train(small_recipe(**SHORT, steps=3), run="at-once").run)
    assert equal_steps(stopped_and_resumed("in-two"), whole) == 3
    assert "The weights of checkpoint 1 are made again" in caplog.text
    two = small_recipe(**SHORT | {"evaluation": {"examples": 2, "greedy": False}})
    again = evaluate(two, run="in-two", checkpoint=2)
    assert "The weights of checkpoint 2 are made again" in caplog.text
    assert [(score.rollouts, score.failed) for score in again.scores.values()] == [(2, 0)]


@pytest.mark.story
@with_fault("rounds log-probabilities to bfloat16")
def test_a_run_on_a_service_of_another_precision_compares_within_what_that_makes_of_weights(
    server: PoorServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = stopped_and_resumed("rounded")
    assert "So what a crash rebuilds is compared within 4 times" in caplog.text
    assert 1e-4 < read_json(run.update(POLICY, 1))["probe/max_difference"] < 0.5


def stopped_and_resumed(name: str) -> RunFolder:
    """Train a run of three steps that its budget stops after the first."""
    recipe = small_recipe(**SHORT, steps=3, budget={"tokens": 1})
    with pytest.raises(UserError):
        train(recipe, run=name)
    grant(run := folder_of(name), {"tokens": 10**9})
    train(recipe, run=name)
    return run


@pytest.mark.story
def test_a_service_that_breaks_the_wire_later_stops_the_run_and_is_named(
    server: PoorServer,
) -> None:
    train(small_recipe(**SHORT, steps=1), run="read")
    server.fault = FAULTS["names no sampled sequences"]
    with pytest.raises(ServiceRefused, match=r"the Tinker service breaks the wire at sampling"):
        train(small_recipe(**SHORT), run="read-no-more")


@with_fault("ignores grad_clip_norm")
def test_doctor_tells_what_of_a_recipe_a_service_forbids(
    server: PoorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = {names: probe for names, probe in SERVICE_PROBES.items() if "grad_clip" in names}
    monkeypatch.setattr(probes, "SERVICE_PROBES", probed)  # all of them take longer
    clipped = ["doctor", "hello", "--set", "optimizer.grad_clip_norm=0.5"]
    said = CliRunner().invoke(app, clipped)
    assert said.exit_code == 2
    assert "hello cannot be trained there" in said.output
    assert "optimizer.grad_clip_norm 0.5 needs" in said.output
    asked = CliRunner().invoke(app, ["doctor", "hello", "--json"])
    record = json.loads(asked.stdout)
    assert (asked.exit_code, record["refuses"], record["unmet"]) == (0, False, [])
    assert {one["name"]: one["verdict"] for one in record["findings"]} == {"grad_clip": "LIES"}
