"""Supervised learning: what is learnt, what is refused, and what a kill changes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.checkpoints.names import find_weights
from ratchet.flows.cli.commands import app
from ratchet.flows.evaluate import evaluate
from ratchet.flows.finetune import finetune
from ratchet.flows.opening.eval_targets import EvalTarget
from ratchet.flows.opening.flow_runs import RunSummary, summarize_run
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.recipe.loading import RecipeError, changed_recipe, named_recipe, read_recipe
from ratchet.flows.recipe.plan import SweepRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.given.measures import read_measure
from ratchet.tasks.recording.queries import answer_query
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.board.runs import runs_table
from ratchet.tasks.reports.page import render_report
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.tracking.recorded_step import RecordedStep
from tests.support.runs.finetuned import RECIPE, TEXTS
from tests.support.runs.killed import train_until_killed
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import small_recipe


@pytest.fixture(scope="module")
def whole(root: Path, recorded_run: RecordedRun) -> RunFolder:
    return recorded_run(RECIPE, "whole")


@pytest.fixture(scope="module")
def summary(whole: RunFolder) -> RunSummary:
    return summarize_run(whole)


def changed(**changes: Any) -> FinetuneRecipe:
    return FinetuneRecipe.model_validate(RECIPE.model_dump() | changes)


def test_the_loss_on_held_out_texts_falls(summary: RunSummary, whole: RunFolder) -> None:
    assert summary.measure == "loss"
    assert summary.before is not None
    assert summary.after is not None
    assert summary.after < summary.before - 0.1
    assert summary.outcome.startswith("held-out loss ")
    rows = read_metrics(whole.metrics)
    assert [row["datums"] for row in rows] == [8] * RECIPE.steps
    assert {(row["texts"], row["texts/cut"], row["texts/ends"]) for row in rows} == {(8, 0, 1.0)}
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["sampler/apart"] <= 1e-4
    assert [step for step, row in enumerate(rows) if "sampler/kl" in row] == [0]
    assert [step for step, row in enumerate(rows, 1) if "test/loss" in row] == [4, 6]
    assert rows[-1]["test/loss"] == summary.after


def test_trackers_are_sent_texts_from_the_lowest_loss_to_the_highest(whole: RunFolder) -> None:
    step = RecordedStep(whole, 0, 0)
    rows: Any = step.tables(99)["texts"]
    losses = [row["loss"] for row in rows]
    assert len(rows) == 8
    assert losses == sorted(losses)
    assert all("Who are you?" in row["prompt"] for row in rows)
    assert all(row["trained"].endswith("<|im_end|>") for row in rows)
    assert min(losses) < read_metrics(whole.metrics)[0]["loss"] < max(losses)
    assert step.tables(2) == {"texts": [rows[0], rows[-1]]}
    assert step.tables(0) == {}


def test_the_best_checkpoint_has_a_name(summary: RunSummary, whole: RunFolder) -> None:
    losses = {int(path.stem): read_measure(path).value for path in whole.measures()}
    best = min(losses, key=lambda step: losses[step])
    assert summary.best_checkpoint == f"step {best}, loss {losses[best]:.3f}: whole@best"
    kept = summary.model_copy(update={"kept_seconds": 3600})
    assert kept.best_checkpoint.endswith("whole@best, which expires 3,600 s after it was saved")
    assert find_weights("whole@best") == find_weights(f"whole@{best}")
    recipe = named_recipe("hello")
    assert EvalTarget.find(recipe, None, None, "whole@best").title == f"whole@{best}"


@pytest.mark.story
@pytest.mark.parametrize(("phase", "done"), [("begin", 1), ("add", 2)])
def test_a_killed_run_ends_with_the_same_bits(whole: RunFolder, phase: str, done: int) -> None:
    """Whether or not the service has applied the updates that nobody noted as saved.

    An update begins before the result of the one before it is awaited.
    """
    name = f"killed-{phase}"
    train_until_killed("finetuned", name, phase)
    assert len(read_metrics(folder_of(name).metrics)) == done
    finetune(RECIPE, run=name)
    assert list_faults(folder_of(name), read_contents(whole)) == []


@pytest.mark.story
def test_a_fork_goes_on_from_a_step_with_the_same_texts(whole: RunFolder) -> None:
    recipe = changed(steps=4, optimizer={"learning_rate": 0.001})
    fork_run(whole, "fork", 2, recipe.model_dump(mode="json"), recipe.fingerprint())
    finetune(recipe, run="fork")
    own, parent = (read_metrics(run.metrics) for run in (folder_of("fork"), whole))
    assert own[:2] == parent[:2]
    assert own[2]["loss"] == parent[2]["loss"]
    assert own[3]["loss"] != parent[3]["loss"]
    assert [*find_damage(folder_of("fork"))] == []
    other = changed(dataset={"path": str(TEXTS), "trained": "all"})
    with pytest.raises(RunError, match="the texts are the parent's; train a new run instead"):
        fork_run(whole, "other", 2, other.model_dump(mode="json"), other.fingerprint())


def test_an_agent_plays_with_what_was_learnt(whole: RunFolder) -> None:
    settings = ["evaluation.examples=8", "evaluation.greedy=false"]
    result = evaluate(named_recipe("hello", settings), model="whole@6")
    assert result.scores["sampled"].rollouts == 8
    assert [*find_damage(whole)] == []
    with pytest.raises(UserError, match="trains no policy listener, which whispers needs"):
        evaluate(named_recipe("whispers-apart"), model="whole@6")


def test_what_reads_runs_reads_one_of_texts(whole: RunFolder) -> None:
    assert read_recipe(whole, FinetuneRecipe) == RECIPE
    with pytest.raises(UserError, match="was made by the flow finetune, and this needs"):
        read_recipe(whole, Recipe)
    assert [*find_damage(whole)] == []
    summary = summarize_run(whole)
    assert f"{summary.before:.3f} → {summary.after:.3f}" in runs_table(120)
    assert "finetune" in runs_table(120)
    report = render_report([whole])
    assert "loss" in report
    assert re.search(r"texts, train: .*400 texts, [\d,]+ tokens, .*400 sequences<", report)
    question = "select split, count(*) as texts from texts group by split order by split"
    assert answer_query(question, [whole], "csv").decode() == "split,texts\ntest,128\ntrain,400\n"


@pytest.mark.parametrize(
    ("rows", "settings", "why"),
    [
        ([{"split": "train"}], {}, "has no rows whose split is 'test'"),
        ([{"text": 3}], {}, "row 0 of .*: its text is 3; give a text"),
        ([{"text": "a b c d"}], {"most_tokens": 2}, "tokens, and dataset.most_tokens is 2; give"),
        (
            [{"text": "a b c d"}],
            {"most_tokens": 2, "too_long": "leave_out"},
            "nothing is trained in the split 'train' of .*: 1 texts, 1 too long and left out",
        ),
        (
            [{"prompt": "a b c d", "completion": "e"}],
            {"most_tokens": 2, "too_long": "cut"},
            "1 cut, 1 cut before their end, 1 without a trained token",
        ),
    ],
)
def test_texts_that_cannot_be_learnt_are_refused_and_leave_nothing(
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    why: str,
    summary: RunSummary,
    tmp_path: Path,
) -> None:
    file = tmp_path / "texts.jsonl"
    whole = [{"split": split, **row} for row in rows for split in ("train", "test")]
    lines = rows if "no rows" in why else whole
    file.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    with pytest.raises(DatasetError, match=why):
        finetune(changed(dataset={"path": str(file), **settings}), run="refused")
    assert not folder_of("refused").exists()


def test_a_flow_refuses_the_recipe_of_another() -> None:
    said = "is of the flow finetune, and this needs one of train; .* evaluate NAME --model RUN` has"
    with pytest.raises(UserError, match=said):
        named_recipe("hello-finetune")
    with pytest.raises(UserError, match="this needs one of sweep; name another one"):
        named_recipe("hello-finetune", kind=SweepRecipe)
    with pytest.raises(UserError, match="is of the flow finetune, and this needs one of train"):
        changed_recipe(RECIPE.model_dump(mode="json"))


def test_epochs_count_the_texts(root: Path) -> None:
    recipe = named_recipe("hello-finetune", ["epochs=1.5"], FinetuneRecipe)
    assert recipe.steps_of(1.5) == 38


@pytest.mark.story
def test_the_best_rollouts_of_a_run_are_learnt_as_they_were_sampled(
    root: Path, recorded_run: RecordedRun, tmp_path: Path
) -> None:
    recorded_run(small_recipe(), "sampled")
    best = (
        "select run, rollout_id from rollouts where split = 'train' and step = {} qualify 1 = "
        "row_number() over (partition by group_id order by reward desc, rollout_id)"
    )
    dataset = {"runs": ["sampled"], "query": best.format(0), "held_out": best.format(1)}
    recipe = changed(dataset=dataset, steps=2, batch={"examples": 4})
    summary = finetune(recipe, run="best")
    shutil.move(folder_of("sampled").path, tmp_path / "sampled")
    finetune(recipe, run="best")  # needs the other run no more
    shutil.move(tmp_path / "sampled", folder_of("sampled").path)
    assert summary.after is not None
    sampled_tokens = "select tokens from trajectories join ({}) using (run, rollout_id)"
    chosen = answer_query(sampled_tokens.format(dataset["query"]), [folder_of("sampled")], "json")
    texts = "select tokens from texts where split = 'train'"
    learnt = answer_query(texts, [folder_of("best")], "json")
    assert sorted(map(str, json.loads(chosen))) == sorted(map(str, json.loads(learnt)))
    assert len(json.loads(learnt)) == 4
    both = changed(dataset=dataset | {"held_out": best.format("step")}, steps=2)
    why = (
        r"held_out chooses the rollout \S+ of sampled, which dataset.query trains, and 3 more; let"
    )
    with pytest.raises(DatasetError, match=why):
        finetune(both, run="both")
    assert not folder_of("both").exists()


MIXED = {
    "chat": {"path": str(TEXTS), "share": 3},
    "people": {"path": str(TEXTS.with_name("people_texts.jsonl"))},
}


@pytest.mark.story
def test_several_sources_are_learnt_by_their_shares(summary: RunSummary) -> None:
    recipe = changed(dataset={"sources": MIXED}, steps=3, evaluation={"examples": 32})
    finetune(recipe, run="mixed")
    run = folder_of("mixed")
    question = (
        "select step, split_part(group_id, '/', 1) as source, count(*) as texts from datums "
        "group by all order by all"
    )
    steps = json.loads(answer_query(question, [run], "json"))
    assert [(row["source"], row["texts"]) for row in steps] == [("chat", 6), ("people", 2)] * 3
    last = read_metrics(run.metrics)[-1]
    assert last["test/loss/chat"] < last["test/loss/people"]
    assert [*find_damage(run)] == []
    kept = {path.name: path.read_bytes() for path in run.learned("policy", "datums")}
    for path in [*run.learned("policy", "datums"), run.metrics]:
        path.unlink()
    finetune(recipe, run="mixed")
    assert {path.name: path.read_bytes() for path in run.learned("policy", "datums")} == kept


def test_shares_are_set_by_the_names_of_their_sources() -> None:
    recipe = changed(dataset={"sources": MIXED}).model_dump(mode="json")
    settings = ["dataset.sources.people.share=2", "epochs=1"]
    other = changed_recipe(recipe, settings, FinetuneRecipe)
    assert other.dataset.shares() == (("chat", 3), ("people", 2))
    assert other.steps_of(1) == 800 / 8


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (
            {"sources": MIXED, "path": "a.jsonl"},
            "sources chat, people with path: each source has its own; leave the dataset's out",
        ),
        ({"sources": {"a": {"share": 2}}}, "path None with no query: examples are of a file"),
        ({"sources": {"a": {"path": "a.jsonl", "share": 0.5}}}, "should be a valid integer"),
        ({"sources": {"a/b": {"path": "a.jsonl"}}}, "should match pattern"),
    ],
)
def test_sources_that_say_too_much_or_too_little_are_refused(
    dataset: dict[str, Any], why: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(why)):
        changed_recipe(RECIPE.model_dump(mode="json") | {"dataset": dataset}, kind=FinetuneRecipe)


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("select 1", "(?s)dataset.query cannot be asked: .*; give one SELECT over the views"),
        ("drop table x", "dataset.query cannot be asked"),
        (
            "select run, rollout_id from rollouts",
            "chooses nothing among the rollouts of whole|The views are|Catalog",
        ),
    ],
)
def test_a_query_that_chooses_nothing_is_refused(whole: RunFolder, query: str, why: str) -> None:
    dataset = {"runs": [whole.name], "query": query, "held_out": query}
    with pytest.raises(DatasetError, match=why):
        finetune(changed(dataset=dataset), run="refused")
    assert not folder_of("refused").exists()


@pytest.mark.story
def test_the_command_trains_and_goes_on_with_a_file_of_texts(root: Path, tmp_path: Path) -> None:
    """A recipe of texts is trained, resumed and forked by the commands of any other run.

    Its file of texts is needed until they are tokens, and then no more.
    """
    file, texts = tmp_path / "texts.yaml", Path(shutil.copy(TEXTS, tmp_path))
    recipe = changed(dataset={"path": str(texts)}, steps=2)
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))

    def call(*words: str) -> str:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "held-out loss" in call("train", str(file), "--run", "by-command")
    texts.unlink()
    folder_of("by-command").metrics.unlink()
    assert "held-out loss" in call("resume", "by-command")
    assert "1 step since by-command@2: held-out loss" in call(
        "fork", "by-command", "--at", "best", "--run", "forked", "--set", "steps=3"
    )
    ratchet = [sys.executable, "-m", "ratchet.flows.cli.main"]
    refused = subprocess.run([*ratchet, "replay", "forked"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "no rollouts: `ratchet fork forked --at 0 --set KEY=VALUE` trains them" in refused.stderr
    call("fork", "forked", "--at", "0", "--run", "anew", "--set", "loss=dft", "--set", "steps=1")
    assert folder_of("anew").texts.samefile(folder_of("by-command").texts)
