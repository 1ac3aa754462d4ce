"""RLHF in three stages, by data in the forms in which it is public."""

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ratchet.adapters.project.modules import load_agent_file
from ratchet.flows.checkpoints.binding import read_bound
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.stages import stages
from ratchet.tasks.examples.reading import read_examples
from ratchet.tasks.given.pairs import read_sides
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import folder_of
from tests.support.processes import ROOT

DATASETS = ROOT / "datasets"
SIDES = ("chosen", "rejected")


def transcript(*said: str) -> str:
    """Write a conversation as Anthropic's hh-rlhf does."""
    who = ("Human", "Assistant")
    return "".join(f"\n\n{who[number % 2]}: {text}" for number, text in enumerate(said))


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATASETS / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with comparisons of `hello` as transcripts, a packed file a split."""
    folder = tmp_path_factory.mktemp("harmless-base")
    rows = rows_of("hello_comparisons.jsonl")
    for split in ("train", "test"):
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
            for row in rows:
                if row["split"] == split:
                    sides = {name: transcript(row["prompt"], row[name]) for name in SIDES}
                    file.write(json.dumps(sides) + "\n")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations of `hello`, a numbered Parquet file a split."""
    folder = tmp_path_factory.mktemp("no_robots")
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    for split in ("train", "test"):
        told = [row for row in rows_of("hello_texts.jsonl") if row["split"] == split]
        lines = (
            {
                "prompt": row["messages"][0]["content"],
                "prompt_id": str(number),
                "messages": row["messages"],
                "category": "Chat",
            }
            for number, row in enumerate(told)
        )
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        file = folder / f"{split}-00000-of-00001.parquet"
        duckdb.sql(f"copy (from read_ndjson('{rows}')) to '{file}' (format parquet)")
    return folder


def test_a_transcript_is_a_conversation_of_which_the_last_answer_differs(pairs: Path) -> None:
    [first, *_] = read_examples(pairs, "train", SIDES)
    [given, *_] = [row for row in rows_of("hello_comparisons.jsonl") if row["split"] == "train"]
    read = read_sides(first["example"])
    assert read is not None
    prompt, sides = ([one.message for one in read[0]], read[1])
    assert prompt == [{"role": "user", "content": given["prompt"]}]
    texts = [[one.message["content"] for one in side] for side in sides]
    assert texts == [[given[name]] for name in SIDES]
    conversation = load_agent_file("conversation").conversation
    assert conversation(first["example"]["chosen"]) == prompt
    several = transcript("Who?", "I.", "Who else?", "You:\n\nand me.")
    assert [one["content"] for one in conversation(several)] == ["Who?", "I.", "Who else?"]


@pytest.mark.story
def test_the_stages_for_public_data_train_by_data_in_its_forms(
    root: Path, pairs: Path, texts: Path, prefect_server: None, no_tinker: None
) -> None:
    model = {"base": "local/tiny-chat", "renderer": "auto", "lora_rank": 16}
    settings = {
        "shared.model": model,
        "stages.texts.recipe.dataset.path": str(texts),
        "stages.texts.recipe.steps": 2,
        "stages.texts.recipe.batch.examples": 8,
        "stages.preferences.recipe.dataset.path": str(pairs),
        "stages.preferences.recipe.steps": 150,
        "stages.preferences.recipe.batch.examples": 32,
        "stages.preferences.recipe.optimizer.learning_rate": 0.002,
        "stages.rewards.recipe.dataset.path": str(pairs),
        "stages.rewards.recipe.steps": 2,
        "stages.rewards.recipe.rollouts.groups": 8,
        "stages.rewards.recipe.rollouts.max_tokens": 16,
        "stages.rewards.recipe.evaluation.examples": 16,
    }
    given = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]
    recipe = named_recipe("rlhf-llama", given, StagesRecipe)
    stages(recipe, run="public")
    preferences, rewards = folder_of("public-2-preferences"), folder_of("public-3-rewards")
    [judge] = [name for name in json.loads(rewards.manifest.read_text())["bound"] if "2-" in name]
    assert read_bound(rewards, judge).run == preferences.name
    for row in read_metrics(rewards.metrics):
        assert row["judge/calls"] == 8 * 6 * 2
        assert row["judge/abstained"] < 0.5
    judged = read_evaluation(rewards.evaluation("00002"))["judged"]
    assert judged.rollouts == 16
    assert judged.finished.mean is not None
    assert judged.spent == {}, "a checkpoint of ours costs nothing"
