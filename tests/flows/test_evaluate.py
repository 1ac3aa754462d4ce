"""evaluate: the base model, a checkpoint or a model of LiteLLM, and no example twice."""

import json
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY, Policy, Sampling
from ratchet.adapters.door.door import OpenDoor
from ratchet.adapters.project.modules import load_agent_file
from ratchet.flows.cli.commands import app
from ratchet.flows.evaluate import evaluate
from ratchet.flows.opening.eval_targets import EvalTarget
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.ends import StepStopped
from ratchet.tasks.recording.journal import Journal, read_journal
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.reports.board.runs import runs_table
from ratchet.tasks.reports.rollouts import read_games
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.door.stand_in import CHAT, END, StandIn, letters
from tests.support.runs.small_recipe import small_recipe

duel = load_agent_file("duel")

ONE_BY_ONE = {"groups": 4, "group_size": 4, "max_tokens": 16, "concurrency": 1}

pytestmark = pytest.mark.usefixtures("prefect_server", "tiny_chat")


async def ask_the_oracle(
    example: dict[str, Any], *, roles: dict[str, dict[str, str]], **_: str
) -> float:
    """Ask the oracle alone, and call that a success."""
    return float(bool(await duel.answer(example["identity"], **roles["oracle"])))


def foretell(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    return "I am silent."


class CutOff(Exception):
    """Failure of the journal in the middle of an evaluation."""


def test_an_evaluation_that_was_cut_off_goes_on_and_plays_no_example_twice(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, rewards = Journal.append, []

    def cut_off(journal: Journal, span: dict[str, Any]) -> Future[None]:
        if span["kind"] == "reward":
            rewards.append(span)
            if len(rewards) == 3:
                raise CutOff
        return append(journal, span)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", cut_off)
        with pytest.raises(CutOff):
            evaluate(small_recipe(rollouts=ONE_BY_ONE), model="base")

    evaluated = evaluate(small_recipe(rollouts=ONE_BY_ONE), model="base")
    folder = evaluated.file.parents[1]
    assert folder.parent == runs / "evaluations"
    spans = read_journal(folder / "journal" / "test-00000.0.jsonl")
    ended = [span["rollout_id"] for span in spans if span["kind"] == "reward"]
    assert len(ended) == len(set(ended)) == 4

    games = [json.loads(line) for line in evaluated.games["sampled"].read_text().splitlines()]
    assert len({game["index"] for game in games}) == 4
    assert all(game["identity"] and game["turn_index"] == 1 for game in games)
    assert games == read_games([folder / "spans" / "test-00000.0.parquet"], ["identity"])
    assert evaluated.scores["sampled"].rollouts == evaluated.scores["greedy"].rollouts == 4
    assert "holds no runs yet" in runs_table(100)

    recipe = write_text(runs / "recipe.yaml", small_recipe(rollouts=ONE_BY_ONE).model_dump_json())
    said = CliRunner().invoke(app, ["evaluate", str(recipe), "--model", "base"]).stdout
    assert said.partition("\n\n")[2].splitlines() == [
        f"numbers {evaluated.file}",
        *(f"games   {path}" for path in evaluated.games.values()),
    ]
    said = CliRunner().invoke(app, ["evaluate", str(recipe), "--model", "base", "--json"]).stdout
    written = json.loads(said)
    assert written["file"] == str(evaluated.file)
    assert written["scores"]["sampled"]["failed"] == 0


def mended(**changes: Any) -> Recipe:
    return small_recipe(
        agent="tests.support.agents.mended_agent:play", rollouts=ONE_BY_ONE, **changes
    )


@pytest.mark.parametrize("broken", ["test-0 greedy-0", "greedy-0"])
def test_an_evaluation_of_which_every_game_failed_is_no_result_and_is_played_again(
    runs: Path, broken: str
) -> None:
    (runs / "broken").write_text(broken)
    recipe = mended()
    for _ in range(2):
        with pytest.raises(
            StepStopped, match=r"4 of the 4 rollouts of \S+-00000 failed\. The"
        ) as no:
            evaluate(recipe, model="base")
        assert "LookupError: the key of the shop has expired at tests/" in str(no.value)
        assert no.value.status != 0
        assert not [*runs.glob("evaluations/*/evaluations/*")]
    (runs / "broken").unlink()
    evaluated = evaluate(recipe, model="base")
    assert [score.failed for score in evaluated.scores.values()] == [0, 0]
    assert [score.rollouts for score in evaluated.scores.values()] == [4, 4]
    assert "failed" not in evaluated.outcome


@pytest.mark.story
def test_failed_games_are_played_again_as_if_they_had_not_failed_and_no_other_is(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = mended(seed=4)
    sound = evaluate(recipe, model="base")
    whole = {path: path.read_bytes() for path in (sound.file, *sound.games.values())}
    folder = RunFolder(sound.file.parents[1])
    folder.delete()

    (runs / "broken").write_text("test-00000-0001 test-00000-0002")
    some = evaluate(recipe, model="base")
    assert some.scores["sampled"].failed == 2
    assert some.outcome.endswith("; 2 rollouts failed, sampled")
    assert "2 of the 4 rollouts of test-00000 failed, and the evaluation is of the" in caplog.text
    journal = folder.journal("test-00000.0")
    before = read_journal(journal)
    (runs / "broken").write_text("test-00000-0002")

    def stop(*_: object) -> None:
        raise CutOff

    with monkeypatch.context() as patch:
        patch.setattr("ratchet.flows.evaluate.submit_held_out", stop)
        with pytest.raises(CutOff):
            evaluate(recipe, model="base", redo_failed=True)
    assert not folder.evaluations(), "what is being played again has no scores"
    assert evaluate(recipe, model="base").scores["sampled"].failed == 1
    (runs / "broken").unlink()
    again = evaluate(recipe, model="base", redo_failed=True)
    assert {path: path.read_bytes() for path in (again.file, *again.games.values())} == whole

    failed = {span["rollout_id"] for span in before if span["kind"] == "error"}
    kept = [span for span in before if span["rollout_id"] not in failed]
    assert read_journal(journal)[: len(kept)] == kept
    assert read_journal(folder.path / "stopped" / "test-00000.0.0.jsonl") == before
    assert evaluate(recipe, model="base", redo_failed=True).scores == again.scores
    assert [*find_damage(folder)] == []


def test_the_command_says_how_many_games_failed_and_plays_them_again(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "broken").write_text("test-00000 greedy-00000")
    recipe = str(write_text(runs / "recipe.yaml", mended().model_dump_json()))
    words = ["evaluate", recipe, "--model", "base"]
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, StepStopped)
    (runs / "broken").write_text("test-00000-0003")
    said = CliRunner().invoke(app, words).stdout
    assert "1 rollout failed: mend the agent, and the same command with --redo-failed" in said
    (runs / "broken").unlink()
    assert "failed:" in CliRunner().invoke(app, words).stdout, "it is not played unasked"
    said = CliRunner().invoke(app, [*words, "--redo-failed"]).stdout
    assert "failed:" not in said
    assert said == CliRunner().invoke(app, words).stdout


def test_a_game_in_which_only_others_were_answered_is_no_result(runs: Path) -> None:
    roles = {"oracle": f"function:{__name__}:foretell"}
    recipe = small_recipe(agent=f"{__name__}:ask_the_oracle", roles=roles, rollouts=ONE_BY_ONE)
    with pytest.raises(StepStopped, match="none has a call of the evaluated model that was"):
        evaluate(recipe, model="base")
    assert not [*runs.glob("evaluations/*/evaluations/*")]


def test_games_that_failed_before_the_rest_was_cut_off_are_played_again_if_none_was_answered(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = mended(evaluation={"examples": 4, "greedy": False})
    sound = evaluate(recipe, model="base")
    scores, folder = sound.scores, RunFolder(sound.file.parents[1])
    folder.delete()
    append, ends = Journal.append, []

    def cut_off(journal: Journal, span: dict[str, Any]) -> Future[None]:
        ends.append(span["kind"] == "error")
        if sum(ends) == 3:
            raise CutOff
        return append(journal, span)

    (runs / "broken").write_text("test-0")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", cut_off)
        with pytest.raises(CutOff):
            evaluate(recipe, model="base")
    assert sum(ends) >= 3
    (runs / "broken").unlink()
    assert evaluate(recipe, model="base").scores == scores


def test_a_run_that_goes_on_tells_no_error_that_is_mended_and_another_once(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = mended(steps=1)
    (runs / "broken").write_text("test-00000 train-00000")
    with pytest.raises(StepStopped):
        train(recipe, run="one")
    (runs / "broken").unlink()
    caplog.clear()
    train(recipe, run="one")
    assert "train-00000, at which the run had stopped, is played anew" in caplog.text
    assert re.findall(r"(\S+) failed|has expired", caplog.text) == ["test-00000", ""]


def test_a_training_goes_on_after_an_evaluation_of_which_every_game_failed(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = mended(steps=1)
    (runs / "broken").write_text("test-00000 greedy-00001")
    ended = train(recipe, run="one")
    assert (ended.steps, ended.before, ended.after is None) == (1, None, False)
    assert caplog.text.count(" failed, and the evaluation is of the others, if any") == 2
    first, last = (RunFolder(runs / "one").evaluation(f"0000{step}") for step in (0, 1))
    told = {how: (one.failed, one.finished.mean) for how, one in read_evaluation(first).items()}
    assert told["sampled"] == (4, None)
    assert read_evaluation(last)["greedy"].failed == 4
    (runs / "broken").unlink()
    assert train(recipe, run="one").before is None, "it is not played unasked"
    sound = evaluate(recipe, model="base").scores
    assert evaluate(recipe, run="one", checkpoint=0, redo_failed=True).scores == sound
    assert train(recipe, run="one").before == sound["sampled"].finished.mean


def test_the_base_model_is_checkpoint_0_of_a_run_of_its_own() -> None:
    named = EvalTarget.find(small_recipe(), None, None, "local/tiny-chat")
    assert (named.run, named.step) == (EvalTarget.find(small_recipe(), None, None, "base").run, 0)
    assert named.title == "base"
    other = EvalTarget.find(small_recipe(seed=1), None, None, "base")
    assert named.run != other.run


@pytest.mark.parametrize(
    ("agent", "subject"),
    [
        ("hello", "hello"),
        ("command:python3 agents/introduce.py", "introduce"),
        ("forks:.venv/bin/python3.12 -m my_program --fast", "my_program"),
        ("forks:.mini/bin/mini -c ${PROJECT}/mini.yaml -t ${example.task}", "mini"),
        ("resident:node agents/resident.mjs", "resident"),
        ("command:sh -c 'my-program --task \"$0\"' ${example.task}", "my-program"),
        ("command:program/node_modules/.bin/codex exec --skip-git-repo-check", "codex"),
        ("command:sh", "sh"),
    ],
)
def test_an_evaluation_of_a_program_is_named_by_the_program(agent: str, subject: str) -> None:
    target = EvalTarget.find(small_recipe(agent=agent), None, None, "base")
    assert re.fullmatch(rf"evaluations/{subject}-base-[0-9a-f]{{8}}", target.run)


def test_a_model_of_litellm_answers_as_the_policy(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("litellm")
    recipe = small_recipe(evaluation={"examples": 2}, rollouts=ONE_BY_ONE)
    policy = Policy(StandIn(lambda *_: [*letters("I am here."), END]), "any")
    with OpenDoor(CHAT, policy, Sampling(16, 1.0, 1.0, -1), "a-key") as door:
        for name, value in door.variables().items():
            monkeypatch.setenv(name, value)
        evaluated = evaluate(recipe, model="openai/any")
    assert set(evaluated.scores) == {"sampled"}
    assert evaluated.scores["sampled"].failed == 0
    spent = evaluated.scores["sampled"].spent[POLICY]
    assert (spent.calls, spent.priced, spent.cost) == (2, 0, None)
    assert spent.sampled_tokens == 2 * len([*letters("I am here."), END])
    folder = evaluated.file.parents[1]
    assert folder.name.startswith("hello-openai-any-")
    calls = [
        span
        for span in read_journal(folder / "journal" / "test-00000.0.jsonl")
        if span["kind"] == "llm"
    ]
    assert [call["policy_version"] for call in calls] == ["openai/any"] * 2
    assert all(call["role"] == "policy" and not call["response_token_ids"] for call in calls)
    assert [call["reply"]["content"] for call in calls] == ["I am here."] * 2


def test_a_recipe_of_another_agent_than_the_run_s_plays_its_own(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = small_recipe(), small_recipe(agent="tests.support.agents.unrewarded:play")
    monkeypatch.setattr("ratchet.flows.opening.eval_targets.read_recipe", lambda _: made)
    asked = made.model_copy(update={"evaluation": other.evaluation, "seed": 7})
    assert EvalTarget.find(asked, "one", 1, None).requested == made, "of its agent, the run's"
    assert EvalTarget.find(other, "one", 1, None).requested.agent == other.agent
