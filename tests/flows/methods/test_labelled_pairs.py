"""A judge by pairs of which the better answer is known: what it agrees with, and what it leaves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.adapters.calls import Policy, Sampling
from ratchet.adapters.door.door import OpenDoor
from ratchet.adapters.rewards import BETTER
from ratchet.flows.cli.commands import app
from ratchet.flows.compare import compare
from ratchet.flows.evaluate import evaluate
from ratchet.flows.finetune import finetune
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import folder_of
from tests.support.door.stand_in import CHAT, END, StandIn, letters
from tests.support.processes import ROOT
from tests.support.runs.small_recipe import small_recipe

PAIRS = ROOT / "datasets" / "hello_comparisons.jsonl"
QUESTION = "Which answer is better?"
ANSWERS = {"fox": "AB", "owl": "BA", "cat": "AA", "ant": ("Tie", "Tie"), "dog": ("Hm.", "A")}
"""What the judge says of each animal where the better answer is shown first, and where second."""


def say(prompt: str) -> str:
    animal = next(name for name in ANSWERS if f"You are a {name}" in prompt)
    return ANSWERS[animal]["A: No" in prompt]


def row(animal: str) -> dict[str, Any]:
    return {
        "prompt": f"You are a {animal}. Who are you?",
        "chosen": f"I am a {animal}.",
        "rejected": "No.",
        "split": "test",
    }


def labelled(path: Path, *rows: dict[str, Any], agent: str = "judge:pairs") -> Recipe:
    """Return the recipe of a judge that is asked of pairs."""
    trained = row("fox") | {"split": "train"}
    path.write_text("".join(f"{json.dumps(one)}\n" for one in (*rows, trained)))
    dataset = {"path": str(path), "compares": QUESTION}
    return small_recipe(agent=agent, dataset=dataset, evaluation={"examples": 128})


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model of LiteLLM that judges as `say` does."""
    pytest.importorskip("litellm")
    answering = StandIn(lambda _, __, prompt: [*letters(say(CHAT.text(prompt))), END])
    with OpenDoor(CHAT, Policy(answering, "any"), Sampling(16, 1.0, 1.0, -1), "a-key") as door:
        for name, value in door.variables().items():
            monkeypatch.setenv(name, value)
        yield "openai/any"


def test_the_score_of_a_judge_is_the_share_of_pairs_of_which_it_prefers_the_chosen_one(
    root: Path, tmp_path: Path, judge: str, prefect_server: None, no_tinker: None
) -> None:
    said = [{"role": "assistant", "content": "I."}]
    compared = {"prompt_conversation": [{"role": "user", "content": "Who are you?"}]}
    compared |= {"completion_A": said, "completion_B": said}
    tie = {"comparison": compared, "label": "Tie", "split": "test"}
    recipe = labelled(tmp_path / "pairs.jsonl", *map(row, ANSWERS), tie)
    [(how, score)] = evaluate(recipe, model=judge).scores.items()
    assert (how, score.rollouts, score.failed) == ("sampled", 5, 0), "a tie is no pair"
    assert (score.finished.examples, score.finished.mean) == (4, 0.5)
    assert score.finished.interval is not None
    assert score.measures == {
        "measure/abstained": pytest.approx(0.2),
        "measure/consistent": 0.75,
        "measure/unread": pytest.approx(0.2),
    }
    file = tmp_path / "judge.yaml"
    file.write_text(recipe.model_dump_json())
    printed = CliRunner().invoke(app, ["evaluate", str(file), "--model", judge]).output
    assert printed.splitlines()[0].split()[-6:-2] == [
        "interval",
        "abstained",
        "consistent",
        "unread",
    ]


def test_a_judge_of_groups_sees_the_better_answer_in_either_place(tmp_path: Path) -> None:
    recipe = labelled(tmp_path / "pairs.jsonl", *map(row, ANSWERS), agent="judge:group")
    shown = [one["example"] for one in recipe.held_out_split().examples()]
    first = [one["rollouts"][0]["id"] for one in shown]
    assert first == ["rejected", "chosen", "rejected", "chosen", "rejected"]
    assert {one[BETTER] for one in shown} == {"chosen"}
    assert all(one["rollouts"][0]["messages"][0]["content"].startswith("You") for one in shown)


def test_a_row_that_is_no_pair_is_refused_by_its_number(tmp_path: Path) -> None:
    recipe = labelled(tmp_path / "pairs.jsonl", row("fox"), {"prompt": "Who?", "split": "test"})
    with pytest.raises(DatasetError, match=r"row 1 of .*pairs.jsonl: it has .*; give prompt, cho"):
        recipe.held_out_split().examples()


@pytest.mark.story
def test_a_judge_that_has_learnt_pairs_is_scored_compared_and_trained_by_them(
    root: Path, judge: str, prefect_server: None, no_tinker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.say", lambda prompt: "Tie")
    dataset = {"path": str(PAIRS), "compares": QUESTION}
    learnt = FinetuneRecipe.model_validate(
        {
            "dataset": dataset,
            "steps": 20,
            "batch": {"examples": 32},
            "evaluation": {"examples": 8},
            "optimizer": {"learning_rate": 0.002},
        }
    )
    finetune(learnt, run="learnt")
    settings = [f"dataset.path={PAIRS}", "evaluation.examples=32", "evaluation.greedy=false"]
    recipe = named_recipe("judge:pairs", settings)
    compared = compare(recipe, ["learnt@20", judge])
    ours, theirs = compared.targets
    assert theirs.reward == 0.5
    assert ours.reward is not None
    assert theirs.difference is not None
    score = read_evaluation(folder_of("learnt").evaluations()[-1])["sampled"]
    assert score.finished.mean == ours.reward
    assert score.measures["measure/abstained"] < 0.25, "it answers A or B"

    changes = ["steps=1", "rollouts.groups=4", "rollouts.group_size=4", "model.start=learnt@20"]
    train(named_recipe("judge:pairs", [*settings, *changes]), run="rewarded")
    (step,) = read_metrics(folder_of("rewarded").metrics)
    assert {"measure/abstained", "measure/unread"} <= step.keys()
    assert step["reward/mean"] == step["reward/policy/mean"]
