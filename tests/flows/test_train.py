"""The stories of training: it repeats itself, it goes on, and it says what is wrong."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.harness.agents import AgentError
from ratchet.flows.cli.training import UNTRAINED, train_with_bar
from ratchet.flows.evaluate import evaluate
from ratchet.flows.opening.flow_runs import RunSummary
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.ends import StepStopped
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.rollouts import RolloutHost
from ratchet.tasks.storage.run_folder import RunError
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update, ending_the_run

OF_A_RESTART = ("seconds/", "spent/", "recall/", "rollouts/retried", "calls/lost")

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")


@pytest.fixture(scope="module")
def trained(root: Path, recorded_run: RecordedRun) -> Path:
    """A run of two steps."""
    return recorded_run(small_recipe(), "one").path


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


@pytest.mark.story
def test_the_same_recipe_twice_is_the_same_run_byte_for_byte(trained: Path, runs: Path) -> None:
    train(small_recipe(), run="two")
    assert len(final_weights(trained)) == 2
    assert final_weights(runs / "two") == final_weights(trained)
    assert without_clocks(runs / "two") == without_clocks(trained)


def test_what_is_sampled_is_what_is_trained(trained: Path) -> None:
    first = read_metrics(trained / "metrics.jsonl")[0]
    assert abs(first["kl_sample_train_v1"]) <= 1e-4
    assert first["kl_sample_train_v2"] <= 1e-8
    assert first["rollouts/ok"] == 16


@pytest.mark.story
def test_a_run_that_is_whole_is_read_and_not_repeated(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a rollout was started")

    monkeypatch.setattr(RolloutHost, "play", refuse)
    outcome = train(small_recipe(), run="one")
    assert outcome.steps == 2
    assert outcome.before is not None
    assert outcome.after is not None


@pytest.mark.story
def test_a_checkpoint_is_scored_anew_only_by_other_settings(trained: Path) -> None:
    evaluations = trained / "evaluations"
    assert set(evaluate(small_recipe(), run="one").scores) == {"sampled", "greedy"}
    assert {path.name for path in evaluations.iterdir()} == {"00000.json", "00002.json"}

    wider = small_recipe(evaluation={"examples": 6, "rollouts": 2, "greedy": False})
    score = evaluate(wider, run="one", checkpoint=0).scores["sampled"]
    assert (score.rollouts, set(score.finished.pass_at)) == (12, {1, 2})
    assert len(list(evaluations.iterdir())) == 3


def test_a_run_is_bound_to_its_recipe(trained: Path) -> None:
    with pytest.raises(RunError, match="seed: 0 → 1"):
        train(small_recipe(seed=1), run="one")


@pytest.mark.story
def test_a_run_whose_engine_dies_goes_on_by_itself(
    trained: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(runs))
    with dying_in_batch("train-00001.0"):
        train(small_recipe(), run="broken")
    assert "the run is started again (start 2 of 3), since the engine" in caplog.text
    assert len(final_weights(trained)) == 2
    assert final_weights(runs / "broken") == final_weights(trained)
    assert without_clocks(runs / "broken") == without_clocks(trained)


@pytest.mark.story
def test_an_engine_that_dies_in_an_update_leaves_it_in_doubt_and_it_is_rebuilt(
    trained: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(runs))
    with dying_in_update(1), ending_the_run():
        train(small_recipe(), run="doubtful")
    assert Ledger(runs / "doubtful" / "checkpoints.jsonl").in_doubt() == 2
    train(small_recipe(), run="doubtful")
    assert final_weights(runs / "doubtful") == final_weights(trained)
    assert without_clocks(runs / "doubtful") == without_clocks(trained)
    update = json.loads((runs / "doubtful" / "updates" / "00001.json").read_text())
    assert update["probe/max_difference"] <= 1e-4
    assert update["probe/optimizer_step"] == 1


def test_a_mistake_in_a_recipe_ends_the_flow_with_a_sentence(runs: Path) -> None:
    with pytest.raises(AgentError, match="no agent 'helo'; there are: arithmetic, "):
        train(small_recipe(agent="helo"), run="one")
    assert not (runs / "one").exists()


def ask_nobody(example: dict[str, str], *, base_url: str, api_key: str, model: str) -> float:
    return float(len(example["identity"]))


@pytest.mark.usefixtures("runs")
def test_a_run_whose_agent_asks_no_policy_is_stopped() -> None:
    recipe = small_recipe(agent=f"{__name__}:ask_nobody", evaluation={"examples": 1})
    with pytest.raises(StepStopped, match=r"rollouts of train-00000\S* have rewards, and none has"):
        train(recipe, run="nobody")


def test_a_run_in_which_every_group_s_rewards_are_equal_says_that_it_trained_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(agent="tests.support.agents.indifferent_agent:play")
    with pytest.raises(SystemExit) as ended:
        train_with_bar("one", recipe)
    assert ended.value.code == UNTRAINED == 3
    why = "the rewards of each group were equal"
    said, logged = capsys.readouterr()
    assert f"held-out reward 0.50 → 0.50 in 2 steps, which trained nothing: {why}" in said
    assert "mend    have rewards differ within a group" in said
    assert (
        f"step 1 of 2: reward 0.50, nothing trained: {why}, held-out reward 0.50 before training"
        in logged
    )


def test_a_run_says_how_many_of_its_steps_trained_nothing() -> None:
    before = RunSummary(run="x", steps=9, before=0.1, after=0.6, seconds=1)
    assert before.outcome == "held-out reward 0.10 → 0.60 in 9 steps"
    some = before.model_copy(update={"untrained": 2, "why": "the judge gave no rollout a score"})
    assert some.outcome == "held-out reward 0.10 → 0.60 in 9 steps, 2 of which trained nothing"
    assert not some.is_untrained


def test_a_key_of_the_wrong_form_is_refused_and_not_shown(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "sk-secret")
    with pytest.raises(ServiceError) as raised:
        train(small_recipe(), run="one")
    assert "starts with 'tml-'" in str(raised.value)
    assert "sk-secret" not in str(raised.value)
