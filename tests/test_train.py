"""The stories of training: it repeats itself, it goes on, and it says what is wrong."""

import json
import os
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from adapters.door.batches import OpenBatch
from adapters.errors import EngineDied, ServiceError
from adapters.harness.agents import AgentError
from adapters.tinker.live_policy import LivePolicy, SubmittedUpdate, UpdateResult
from adapters.tinker.service import Service
from flows.evaluate import evaluate
from flows.train import train
from tasks.checkpoints import Ledger
from tasks.examples.reading import DatasetError
from tasks.metrics import read_metrics
from tasks.rollouts import Play, RolloutServer
from tasks.storage.run_folder import RunError
from tests.small_recipe import HELLO, small_recipe

OF_A_RESTART = ("seconds/", "replay/", "rollouts/retried", "calls/lost")

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None
) -> Iterator[tuple[Path, Path]]:
    """Two runs of one recipe, of two steps each."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        for name in ("one", "two"):
            train(small_recipe(), run=name)
        yield root / "one", root / "two"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    return tmp_path


def final_weights(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the LoRA and of the optimizer's state of the last checkpoint."""
    last = json.loads((run / "checkpoints.jsonl").read_text().splitlines()[-1])
    name = last["state"].removeprefix("tinker://")
    files = (run / "engine").rglob(f"{name}.*/*.safetensors")
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def without_clocks(run: Path) -> list[dict[str, float]]:
    """Return the metrics that an interrupted run shares with an undisturbed one."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(OF_A_RESTART)} for row in rows]


def test_the_same_recipe_twice_is_the_same_run_byte_for_byte(trained: tuple[Path, Path]) -> None:
    one, two = trained
    assert len(final_weights(one)) == 2
    assert final_weights(one) == final_weights(two)
    assert without_clocks(one) == without_clocks(two)


def test_what_is_sampled_is_what_is_trained(trained: tuple[Path, Path]) -> None:
    first = read_metrics(trained[0] / "metrics.jsonl")[0]
    assert abs(first["kl_sample_train_v1"]) <= 1e-4
    assert first["kl_sample_train_v2"] <= 1e-8
    assert first["rollouts/ok"] == 16


def test_a_run_that_is_whole_is_read_and_not_repeated(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a rollout was started")

    monkeypatch.setattr(RolloutServer, "play", refuse)
    outcome = train(small_recipe(), run="one")
    assert outcome.steps == 2
    assert outcome.before is not None
    assert outcome.after is not None


def test_a_checkpoint_is_scored_anew_only_by_other_settings(trained: tuple[Path, Path]) -> None:
    evaluations = trained[0] / "evaluations"
    assert set(evaluate(small_recipe(), run="one").scores) == {"sampled", "greedy"}
    assert {path.name for path in evaluations.iterdir()} == {"00000.json", "00002.json"}

    wider = small_recipe(evaluation={"examples": 6, "rollouts": 2, "greedy": False})
    score = evaluate(wider, run="one", checkpoint=0).scores["sampled"]
    assert (score.rollouts, set(score.finished.pass_at)) == (12, {1, 2})
    assert len(list(evaluations.iterdir())) == 3


def test_a_run_is_bound_to_its_recipe(trained: tuple[Path, Path]) -> None:
    with pytest.raises(RunError, match="seed: 0 → 1"):
        train(small_recipe(seed=1), run="one")


def test_an_engine_that_dies_ends_the_run_which_then_continues(
    trained: tuple[Path, Path], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = RolloutServer.play

    def die_in_the_second_step(server: RolloutServer, batch: OpenBatch, how: Play) -> None:
        if batch.name == "train-00001.0":
            os.kill(engine_of(server.service), signal.SIGKILL)
        play(server, batch, how)

    monkeypatch.setattr(RolloutServer, "play", die_in_the_second_step)
    with pytest.raises(EngineDied, match="ended with code -9"):
        train(small_recipe(), run="broken")
    monkeypatch.undo()

    monkeypatch.setenv("RATCHET_RUNS", str(runs))
    train(small_recipe(), run="broken")
    assert final_weights(runs / "broken") == final_weights(trained[0])
    assert without_clocks(runs / "broken") == without_clocks(trained[0])


@pytest.mark.story
def test_an_engine_that_dies_in_an_update_leaves_it_in_doubt_and_it_is_rebuilt(
    trained: tuple[Path, Path], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = LivePolicy.result

    def die_in_the_second_step(live: LivePolicy, submitted: SubmittedUpdate) -> UpdateResult:
        if submitted.step == 1:
            submitted.outputs[-1].result()
            os.kill(engine_of(live._service), signal.SIGKILL)
        return result(live, submitted)

    monkeypatch.setattr(LivePolicy, "result", die_in_the_second_step)
    with pytest.raises(EngineDied, match="ended with code -9"):
        train(small_recipe(), run="doubtful")
    monkeypatch.undo()

    monkeypatch.setenv("RATCHET_RUNS", str(runs))
    assert Ledger(runs / "doubtful" / "checkpoints.jsonl").in_doubt() == 2
    train(small_recipe(), run="doubtful")
    assert final_weights(runs / "doubtful") == final_weights(trained[0])
    assert without_clocks(runs / "doubtful") == without_clocks(trained[0])
    update = json.loads((runs / "doubtful" / "updates" / "00001.json").read_text())
    assert update["probe/max_difference"] <= 1e-4
    assert update["probe/optimizer_step"] == 1


def engine_of(service: Service) -> int:
    assert service.server.process is not None
    return service.server.process


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"agent": "helo"},
            AgentError,
            "no agent 'helo'; there are: arithmetic, gsm8k, guess_the_number, hello",
        ),
        ({"dataset": {"path": "none.csv"}}, DatasetError, "none.csv does not exist"),
        (
            {"dataset": {"path": str(HELLO), "columns": ["name"]}},
            DatasetError,
            "has no column 'name' (found: identity, split)",
        ),
        ({"model": {"base": "/no/such/model"}}, ServiceError, "/no/such/model"),
    ],
)
def test_what_a_user_can_mend_is_said_in_a_sentence(
    runs: Path, changes: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        train(small_recipe(**changes), run="one")
    assert said in str(raised.value)


def test_a_key_of_the_wrong_form_is_refused_and_not_shown(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "sk-secret")
    with pytest.raises(ServiceError) as raised:
        train(small_recipe(), run="one")
    assert "starts with 'tml-'" in str(raised.value)
    assert "sk-secret" not in str(raised.value)
