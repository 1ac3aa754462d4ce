"""Faults of the Tinker service: each is retried or raised with a reason, and nothing is lost."""

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.project.modules import load_agent_file
from ratchet.adapters.tinker.service import ServiceRefused, TimedOut
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.ends import StepStopped
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address, serving
from tests.support.servers.fault_proxy import Fault, FaultProxy, proxied

pytestmark = pytest.mark.usefixtures("prefect_server")

SHIPPED = Path("local/tiny-chat")
hello = load_agent_file("hello")


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
    from ratchet.tasks.storage.run_folder import runs_root

    return runs_root() / name


def result_of(run: Path, engine: Address) -> list[Any]:
    last = json.loads((run / "checkpoints.jsonl").read_text().splitlines()[-1])
    name = last["state"].removeprefix("tinker://")
    files = [*(engine.state).rglob(f"{name}.*/*.safetensors"), *run.glob("datums/*.parquet")]
    weights = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
    assert len(weights) == 4
    rows = read_metrics(run / "metrics.jsonl")
    apart = ("seconds/", "spent/", "recall/", "calls/lost", "rollouts/retried")
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
    engine: Address, proxy: FaultProxy, undisturbed: list[Any]
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [("refused", r"refuses this run: the proxy says so"), ("user", r"refused the request: the pr")],
)
def test_a_service_that_refuses_every_call_trains_nothing_and_records_no_end(
    engine: Address, proxy: FaultProxy, undisturbed: list[Any], kind: Any, said: str
) -> None:
    name = f"all-{kind}"
    proxy.script(Fault("asample", kind, times=10**6))
    with pytest.raises(ServiceRefused, match=said):
        trained(name, engine)
    folder = folder_of(name)
    spans = [span for journal in folder.glob("journal/*") for span in read_journal(journal)]
    assert {span["kind"] for span in spans} == {"begun", "refused"}
    assert read_metrics(folder / "metrics.jsonl") == []
    assert not [*folder.glob("evaluations/*")]

    proxy.script()
    assert trained(name, engine) == undisturbed


async def breaks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Play hello, and break where the file BROKEN says, while it is there."""
    file = Path(os.environ["BROKEN"])
    if file.exists() and "train-00001" in base_url and file.read_text() in base_url:
        raise KeyError("city")
    return await hello.play(example, base_url=base_url, api_key=api_key, model=model)


@pytest.mark.parametrize(
    ("where", "most_failed", "said"),
    [
        (
            "train",
            1.0,
            r"8 of the 8 rollouts of train-00001 failed, and 0 .* KeyError: 'city' at \S+:\d+ \(8",
        ),
        ("-01/attempt", 0.2, r"2 of the 8 rollouts of train-00001 failed, and 6 earned a reward"),
    ],
)
def test_a_step_with_too_few_rewards_stops_the_run_which_then_plays_it_anew(
    where: str,
    most_failed: float,
    said: str,
    engine: Address,
    proxy: FaultProxy,
    undisturbed: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy.script()
    broken, name = tmp_path / "broken", f"stopped-{most_failed}"
    broken.write_text(where)
    monkeypatch.setenv("BROKEN", str(broken))
    values = recipe().model_dump(exclude={"flow"})
    values["rollouts"]["most_failed"] = most_failed
    stops = Recipe.model_validate(values | {"agent": "tests.stories.test_faults:breaks"})
    for _ in range(2):
        with pytest.raises(StepStopped, match=said) as stopped:
            train(stops, run=name)
        assert stopped.value.status == 1
    assert len(read_metrics(folder_of(name) / "metrics.jsonl")) == 1

    broken.unlink()
    train(stops, run=name)
    assert result_of(folder_of(name), engine) == undisturbed
    assert len([*(folder_of(name) / "stopped").iterdir()]) == 2
    assert [*find_damage(RunFolder(folder_of(name)))] == []
