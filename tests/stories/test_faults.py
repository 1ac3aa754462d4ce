"""Faults of the Tinker service: each is retried or raised with a reason, and nothing is lost."""

import json
import logging
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from adapters.tinker.faults import ServiceRefused, TimedOut
from flows.recipe.recipe import Recipe
from flows.train import train
from tasks.metrics import read_metrics
from tasks.recording.journal import read_journal
from tests.support.engine_server import Address, serving
from tests.support.fault_proxy import Fault, FaultProxy, proxied
from tests.support.small_recipe import small_recipe

pytestmark = pytest.mark.usefixtures("prefect_server")

SHIPPED = Path("local/tiny-chat")


def recipe(timeout_seconds: float = 60) -> Recipe:
    return small_recipe(
        rollouts={"groups": 2, "group_size": 4, "max_tokens": 16},
        evaluation={"examples": 1, "greedy": False},
        service={"timeout_seconds": timeout_seconds},
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(SHIPPED, tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture(scope="module")
def proxy(
    engine: Address, prefect_server: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultProxy]:
    with proxied(engine.url) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", proxy.url)
        patch.setenv("TINKER_API_KEY", engine.key)
        patch.setenv("RATCHET_RUNS", str(tmp_path_factory.mktemp("runs")))
        yield proxy


@pytest.fixture(scope="module")
def undisturbed(engine: Address, proxy: FaultProxy) -> list[Any]:
    proxy.script()
    return trained("undisturbed", engine)


def trained(name: str, engine: Address, timeout_seconds: float = 60) -> list[Any]:
    """Train a run and return its result: weights and optimizer, metrics, datums."""
    train(recipe(timeout_seconds), run=name)
    return result_of(folder_of(name), engine)


def folder_of(name: str) -> Path:
    from tasks.storage.run_folder import runs_root

    return runs_root() / name


def result_of(run: Path, engine: Address) -> list[Any]:
    last = json.loads((run / "checkpoints.jsonl").read_text().splitlines()[-1])
    name = last["state"].removeprefix("tinker://")
    files = [*(engine.state).rglob(f"{name}.*/*.safetensors"), *run.glob("datums/*.parquet")]
    weights = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
    assert len(weights) == 4
    rows = read_metrics(run / "metrics.jsonl")
    apart = ("seconds/", "replay/", "calls/lost", "rollouts/retried")
    return [weights, [{k: v for k, v in row.items() if not k.startswith(apart)} for row in rows]]


PASSING = {
    "a rate limit on forward_backward": Fault("forward_backward", "limited"),
    "a rate limit on sampling": Fault("asample", "limited", skip=2, times=2),
    "two server errors on forward_backward": Fault("forward_backward", "broken", times=2),
    "a server error on sampling": Fault("asample", "broken", skip=1),
    "an optim_step while the service is unavailable": Fault("optim_step", "unavailable"),
    "a save while the service is unavailable": Fault("save_weights", "unavailable"),
    "server errors while polling": Fault("retrieve_future", "broken", skip=8, times=3),
    "a rate limit while polling": Fault("retrieve_future", "limited", skip=8),
    "try_again while polling": Fault("retrieve_future", "try_again", skip=8, times=5),
    "a forward_backward that is lost": Fault("forward_backward", "dropped before"),
    "a forward_backward whose answer is lost": Fault("forward_backward", "dropped after"),
    "an optim_step whose answer is lost": Fault("optim_step", "dropped after"),
    "a poll that is dropped": Fault("retrieve_future", "dropped after", skip=8),
    "slow answers": Fault("retrieve_future", "slow", skip=4, times=4),
    "a forward_backward that fails at the server": Fault("forward_backward", "server", skip=1),
    "an optim_step that fails for unknown reasons": Fault("optim_step", "unknown", skip=1),
    "an optim_step said to have failed, twice": Fault("optim_step", "server", times=2),
    "a save that fails at the server": Fault("save_weights_for_sampler", "server", skip=1),
    "sampling that fails at the server": Fault("asample", "server", skip=3),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", PASSING)
def test_a_run_with_a_passing_fault_ends_with_the_same_result(
    name: str, engine: Address, proxy: FaultProxy, undisturbed: list[Any]
) -> None:
    proxy.script(PASSING[name])
    assert trained(name.replace(" ", "-"), engine) == undisturbed
    assert proxy.struck


SILENT = {
    "a forward_backward that is never answered": Fault("forward_backward", "silent", skip=1),
    "an optim_step that is never answered": Fault("optim_step", "silent"),
    "sampling that is never answered": Fault("asample", "silent", skip=3),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", SILENT)
def test_a_request_that_is_never_answered_is_logged_and_retried(
    name: str,
    engine: Address,
    proxy: FaultProxy,
    undisturbed: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.script(SILENT[name])
    with caplog.at_level(logging.WARNING, logger="adapters"):
        assert trained(name.replace(" ", "-"), engine, timeout_seconds=4) == undisturbed
    assert proxy.struck["silent"] == 1
    if SILENT[name].endpoint != "asample":
        assert f"waiting for {SILENT[name].endpoint} of step" in caplog.text


@pytest.mark.story
def test_a_request_refused_as_the_user_s_error_is_not_repeated(
    engine: Address, proxy: FaultProxy, undisturbed: list[Any]
) -> None:
    proxy.script(Fault("forward_backward", "user"))
    with pytest.raises(ServiceRefused, match=r"refuses forward_backward of step 0: the proxy says"):
        trained("blamed", engine)
    assert proxy.seen["forward_backward"] == 1

    proxy.script()
    assert trained("blamed", engine) == undisturbed


def test_a_refused_key_raises_at_once(engine: Address, proxy: FaultProxy) -> None:
    proxy.script(Fault("create_model", "refused"))
    with pytest.raises(ServiceRefused, match=r"a new training client: the proxy says so \(401\)"):
        trained("refused", engine)
    assert proxy.seen["create_model"] == 1


def test_a_rollout_whose_request_is_refused_is_a_row_with_its_error(
    engine: Address, proxy: FaultProxy
) -> None:
    proxy.script(Fault("asample", "user", skip=3))
    train(recipe(), run="one-refused")
    folder = folder_of("one-refused")
    spans = [span for journal in folder.glob("journal/*") for span in read_journal(journal)]
    assert [span["error_type"] for span in spans if span["kind"] == "error"] == ["BadRequestError"]


def test_a_service_that_stays_silent_raises_timed_out(engine: Address, proxy: FaultProxy) -> None:
    proxy.script(Fault("create_model", "silent", times=99))
    with pytest.raises(TimedOut, match=r"within 2 s \(waited for a new training client\)"):
        trained("silent", engine, timeout_seconds=2)
