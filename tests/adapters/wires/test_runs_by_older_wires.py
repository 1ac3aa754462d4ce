"""Runs on a server of an older wire: what they end with is what they end with on the engine."""

import json
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.adapters.tinker.live_policy import LivePolicy, SubmittedUpdate, UpdateResult
from ratchet.flows.recipe.service_needs import read_diagnosis
from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address, serving
from tests.support.servers.older_server import OlderServer, older

pytestmark = pytest.mark.usefixtures("prefect_server")

RECIPE = small_recipe(
    steps=3,
    rollouts={"groups": 2, "group_size": 4, "max_tokens": 16},
    evaluation={"examples": 1, "greedy": False},
    checkpoints={"every": 1},
)
APART = ("seconds/", "spent/", "recall/", "calls/lost", "rollouts/retried")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Address]:
    with serving(Path("local/tiny-chat"), tmp_path_factory.mktemp("engine")) as address:
        yield address


def trained(name: str, url: str, engine: Address, root: Path) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", url)
        patch.setenv("TINKER_API_KEY", engine.key)
        train(RECIPE, run=name)
    return RunFolder(root / name)


def contents(run: RunFolder, engine: Address, server: OlderServer | None = None) -> list[Any]:
    """Return what a run ended with: weights and optimizer, datums and metrics."""
    last = json.loads((run.path / "checkpoints.jsonl").read_text().splitlines()[-1])
    model, _, name = last["state"].removeprefix("tinker://").partition("/")
    at = f"{server.engines_name(model) if server else model}/{name}"
    weights = [*engine.state.rglob(f"{at}.*/*.safetensors")]
    datums = sorted(run.path.glob("datums/*.parquet"))
    assert weights
    assert len(datums) == RECIPE.steps
    files = {one.name: sha256(one.read_bytes()).hexdigest() for one in (*weights, *datums)}
    rows = read_metrics(run.metrics)
    return [files, [{k: v for k, v in row.items() if not k.startswith(APART)} for row in rows]]


@pytest.fixture(scope="module")
def undisturbed(engine: Address, root: Path) -> list[Any]:
    return contents(trained("undisturbed", engine.url, engine, root), engine)


@pytest.mark.story
@pytest.mark.parametrize("datums", ["json", "protobuf"])
def test_a_run_by_an_older_wire_ends_with_the_weights_of_the_engine(
    datums: str, engine: Address, root: Path, undisturbed: list[Any]
) -> None:
    with older(engine.url, datums=datums) as server:
        run = trained(f"by-{datums}", server.url, engine, root)
        assert contents(run, engine, server) == undisturbed
        assert server.live == set()
        assert server.seen["forward_backward"] > 1
        sdk = {"json": "0.24", "protobuf": "0.25"}[datums]
        assert read_diagnosis(run)["wire"].measured.endswith(f"the wire of SDK {sdk}")


@pytest.mark.story
def test_a_run_whose_bridge_is_killed_loads_its_state_and_ends_with_the_same_weights(
    engine: Address, root: Path, undisturbed: list[Any]
) -> None:
    result, killed = LivePolicy.result, list[int]()

    def die(live: LivePolicy, submitted: SubmittedUpdate) -> UpdateResult:
        if submitted.step == 1 and not killed:
            submitted.outputs[-1].output.result()
            [bridge] = [
                child
                for child in psutil.Process().children()
                if "ratchet.adapters.wires.program" in child.cmdline()
            ]
            bridge.send_signal(signal.SIGKILL)
            killed.append(bridge.pid)
        return result(live, submitted)

    with older(engine.url, datums="json") as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePolicy, "result", die)
        run = trained("killed", server.url, engine, root)
        assert killed
        assert server.seen["load_weights"] >= 3  # two questions, and the state
        assert contents(run, engine, server) == undisturbed
