"""Configurations of Trinity-RFT that train texts, pairs or stages become recipes that train."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.flows.finetune import finetune
from ratchet.flows.importing.trinity import import_trinity
from ratchet.flows.importing.trinity_file import ImportRefusal
from ratchet.flows.recipe.given_recipes import FinetuneRecipe, PreferRecipe
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import FlowRecipe
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.dotted_keys import merge_values
from ratchet.tasks.storage.run_folder import folder_of

DATASETS = Path(__file__).parents[2] / "datasets"
OURS = ("model.base=local/tiny-chat",)
SFT = {
    "mode": "train",
    "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
    "model": {"model_path": "some/model", "max_model_len": 512, "tinker": {"enable": True}},
    "buffer": {
        "total_steps": 3,
        "train_batch_size": 8,
        "trainer_input": {"experience_buffer": {"path": str(DATASETS / "hello_texts.jsonl")}},
    },
    "trainer": {"save_interval": 2},
}
RFT = {
    "mode": "both",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": SFT["model"] | {"max_response_tokens": 32},
    "buffer": {
        "batch_size": 4,
        "total_steps": 2,
        "explorer_input": {
            "taskset": {"path": str(DATASETS / "gsm8k")},
            "default_workflow_type": "math_workflow",
        },
    },
}


def imported(values: Any, *overrides: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    text = import_trinity(
        "t.yaml", yaml.safe_dump(merge_values(values, changes)), [*OURS, *overrides]
    )
    return text, yaml.safe_load(text)


def with_rows(**form: Any) -> dict[str, Any]:
    return {"buffer": {"trainer_input": {"experience_buffer": {"format": form}}}}


def test_sft_becomes_a_recipe_of_finetune() -> None:
    text, values = imported(SFT, **with_rows(messages_key="messages"))
    recipe = FinetuneRecipe.model_validate(values)
    assert (recipe.steps, recipe.batch.examples, recipe.batch.normalisation) == (3, 8, "token")
    assert (recipe.dataset.trained, recipe.dataset.most_tokens) == ("last_message", 512)
    assert (recipe.checkpoints.every, recipe.optimizer.learning_rate) == (2, 1e-3)
    assert recipe.dataset.columns == {}
    assert 'flow: "finetune"  # algorithm.algorithm_type sft\n' in text


@pytest.mark.parametrize(
    ("algorithm", "form", "columns"),
    [
        ("sft", {}, {"messages": "message"}),
        ("sft", {"tools_key": "functions"}, {"messages": "message", "tools": "functions"}),
        ("sft", {"prompt_type": "plaintext", "prompt_key": "q"}, {"prompt": "q", "completion": ""}),
        ("cpt", {"prompt_type": "plaintext", "prompt_key": "body"}, {"text": "body"}),
        ("dpo", {}, {"prompt": "message"}),
        ("dpo", {"prompt_type": "plaintext", "chosen_key": "good"}, {"chosen": "good"}),
    ],
)
def test_columns_of_other_names_are_named(
    algorithm: str, form: dict[str, str], columns: dict[str, str]
) -> None:
    _, values = imported(
        SFT, **merge_values({"algorithm": {"algorithm_type": algorithm}}, with_rows(**form))
    )
    expected = {ours: theirs or "response" for ours, theirs in columns.items()}
    assert values["dataset"]["columns"] == expected


def test_every_answer_is_trained_where_trinity_trains_all_turns_and_all_tokens_by_cpt() -> None:
    whole = with_rows(enable_concatenated_multi_turn=True)
    assert imported(SFT, **whole)[1]["dataset"]["trained"] == "assistant"
    cpt = {"algorithm": {"algorithm_type": "cpt"}}
    assert imported(SFT, **cpt)[1]["dataset"]["trained"] == "all"


@pytest.mark.parametrize("of_rows", [True, None])
def test_whether_the_model_thinks_is_that_of_the_rows_or_else_of_the_model(
    of_rows: bool | None,
) -> None:
    changes = merge_values(
        {"model": {"enable_thinking": False}}, with_rows(enable_thinking=of_rows)
    )
    assert imported(SFT, **changes)[1]["model"]["thinking"] is bool(of_rows)


def test_dpo_becomes_a_recipe_of_prefer() -> None:
    dpo = {"algorithm_type": "dpo", "policy_loss_fn_args": {"beta": 0.3, "label_smoothing": 0.1}}
    text, values = imported(SFT, algorithm=dpo)
    recipe = PreferRecipe.model_validate(values)
    assert (recipe.batch.pairs, recipe.preference.loss) == (8, "dpo")
    assert recipe.preference.loss_settings == {"beta": 0.3, "smoothing": 0.1}
    assert "# algorithm.kl_loss_fn: adds a KL to the loss" in text


def test_raft_trains_every_rollout_alike_as_texts_are() -> None:
    raft = {"algorithm_type": "raft", "repeat_times": 1}
    recipe = Recipe.model_validate(imported(RFT, algorithm=raft)[1])
    made = recipe.algorithm
    assert (made.advantage, made.loss, made.kl.coefficient) == ("none", "cross_entropy", 0)
    assert made.rewards is not None
    assert "1.0 as reward" in made.rewards


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "both"}, "mode both with sft is refused by Trinity too"),
        ({"buffer": {"train_batch_size": 0}}, r"no rollouts say how many rows; give --set batch.e"),
        (with_rows(prompt_type="chatpair"), "prompt_type chatpair has no counterpart"),
        (with_rows(prompt_type="plaintext", system_prompt="Be."), "write it into the prompts"),
        ({"algorithm": {"loss_agg_mode": "seq-mean-token-sum-norm"}}, "has no counterpart"),
    ],
)
def test_what_no_recipe_says_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ImportRefusal, match=said):
        imported(SFT, **changes)


def stages_of(*stages: dict[str, Any]) -> dict[str, Any]:
    return {**RFT, "stages": [*stages]}


WARMUP = {"stage_name": "sft-warmup"} | {
    key: SFT[key] for key in ("mode", "algorithm", "buffer", "trainer")
}


def test_stages_become_a_recipe_of_stages_whose_sections_are_replaced_as_a_whole(
    tmp_path: Path,
) -> None:
    one = "stages.rft.recipe.rollouts.max_tokens=9"
    text, _ = imported(stages_of(WARMUP, {"stage_name": "rft"}), one, "checkpoints.every=7")
    file = tmp_path / "stages.yaml"
    file.write_text(text)
    recipe = named_recipe(str(file), kind=FlowRecipe)
    assert isinstance(recipe, StagesRecipe)
    assert recipe.names() == ["sft_warmup", "rft"]
    warmup, rft = (stage.recipe for stage in recipe.stages)
    assert isinstance(rft, Recipe)
    assert (warmup.steps, rft.steps, rft.rollouts.max_tokens) == (3, 2, 9)
    assert warmup.checkpoints.every == rft.checkpoints.every == 7
    first, second = recipe.children("run")
    assert (first.name, second.recipe.model.start) == ("run-1-sft_warmup", "run-1-sft_warmup@3")


def test_a_stage_that_cannot_be_imported_is_named_and_so_is_a_section_of_none() -> None:
    with pytest.raises(ImportRefusal, match="trained, and a Tinker service trains LoRA"):
        import_trinity("t.yaml", yaml.safe_dump({**SFT, "model": {"model_path": "m"}}))
    with pytest.raises(ImportRefusal, match=r"stages\[0\] has model; Trinity knows none"):
        imported(stages_of({**WARMUP, "model": {}}))


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_an_import_trains_on_rows_of_other_columns_and_conversations_that_are_json(
    root: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (DATASETS / "hello_texts.jsonl").open()]
    renamed = [{"said": json.dumps(row["messages"]), "split": row["split"]} for row in rows]
    data, file = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    buffer = {"path": str(data), "format": {"messages_key": "said"}}
    text, _ = imported(SFT, buffer={"trainer_input": {"experience_buffer": buffer}})
    file.write_text(text)
    finetune(named_recipe(str(file), ["evaluation.examples=8"], FinetuneRecipe), run="renamed")
    plain = imported(SFT, **with_rows(messages_key="messages"))[1]
    finetune(FinetuneRecipe.model_validate(plain | {"evaluation": {"examples": 8}}), run="plain")
    losses = [
        [row["loss"] for row in read_metrics(folder_of(n).metrics)] for n in ("renamed", "plain")
    ]
    assert losses[0] == losses[1]
