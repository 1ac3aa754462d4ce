"""Configurations of Trinity-RFT become recipes, which say what was left out."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.yaml_text import read_yaml, write_yaml
from ratchet.flows.importing.trinity import import_trinity
from ratchet.flows.importing.trinity_algorithm import ADVANTAGES, ALGORITHMS, EXPERTS, LOSSES
from ratchet.flows.importing.trinity_file import (
    ImportRefusal,
    TrinityFile,
    known_keys,
    read_values,
    trinity_file,
)
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.dotted_keys import merge_values
from tests.flows.test_presets import TRINITY
from tests.support.runs.small_recipe import DISTILLED

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "tests" / "support" / "trinity.yaml").read_text(encoding="utf-8")
OURS = [f"dataset.path={ROOT / 'datasets' / 'gsm8k'}", "model.base=local/tiny-chat"]
"""The data and the model in place of those that the file names."""


def imported(*overrides: str, **changes: Any) -> Recipe:
    """Import the configuration with changes, and make its recipe."""
    return Recipe.model_validate(read_yaml(text_of(*overrides, **changes)))


def text_of(*overrides: str, **changes: Any) -> str:
    values = merge_values(read_yaml(CONFIG), changes)
    return import_trinity("trinity.yaml", write_yaml(values), [*OURS, *overrides])


def algorithm(**values: Any) -> dict[str, Any]:
    return {"algorithm": {"kl_loss_fn_args": None} | values}


def with_buffer(**replay: Any) -> dict[str, Any]:
    return {"buffer": {"trainer_input": {"experience_buffer": {"replay_buffer": replay}}}}


def pipeline(**values: Any) -> dict[str, Any]:
    return {"data_processor": values}


PASS_RATES = {"name": "pass_rate_calculator"}


def test_the_published_configuration_becomes_a_recipe_with_its_defaults_made_explicit() -> None:
    recipe = imported()
    assert (recipe.epochs, recipe.steps, recipe.seed) == (1, 0, 42)
    assert (recipe.agent, recipe.dataset.order) == ("gsm8k", "sequential")
    rollouts, optimizer = recipe.rollouts, recipe.optimizer
    assert (rollouts.groups, rollouts.group_size, rollouts.lag) == (96, 8, 1)
    assert (rollouts.max_tokens, rollouts.temperature) == (2048, 1.0)
    assert (rollouts.timeout_seconds, rollouts.attempts) == (1800, 3)
    adam = (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay)
    assert (optimizer.learning_rate, *adam) == (1e-5, 0.9, 0.999, 1e-12, 0.01)
    assert (optimizer.grad_clip_norm, optimizer.schedule) == (1.0, "constant")
    assert (recipe.model.lora_rank, recipe.checkpoints.every) == (16, 100)
    assert recipe.model.renderer.startswith("jinja:{{- bos_token }}")
    assert recipe.tracking.project == "Trinity-RFT-gsm8k"
    made = recipe.algorithm
    assert (made.advantage, made.loss, made.aggregation) == (
        "standardized",
        "dual_clip",
        "rollout_mean",
    )
    assert made.kl.coefficient == 0


def parsed(name: str, text: str) -> TrinityFile:
    return trinity_file(name, read_values(name, text))


def test_each_value_says_where_it_comes_from_and_each_key_left_out_what_it_does() -> None:
    text = text_of()
    assert "  groups: 96  # buffer.batch_size\n" in text
    assert "  beta2: 0.999  # Trinity's default of algorithm.optimizer.betas\n" in text
    assert '  base: "local/tiny-chat"  # given by --set\n' in text
    told = [key for key in parsed("", CONFIG).given if key not in known_keys().defaults]
    assert len(told) == 13
    assert all(f"\n# {key}: " in text for key in [*told, "model.max_prompt_tokens"])


def test_without_replacements_the_recipe_names_the_model_and_the_data_of_the_file() -> None:
    recipe = read_yaml(import_trinity("trinity.yaml", CONFIG))
    assert recipe["dataset"]["path"] == "hub:openai/gsm8k/main"
    assert (recipe["agent"], recipe["model"]["base"]) == ("gsm8k", "meta-llama/Llama-3.2-3B")
    assert (recipe["epochs"], "steps" in recipe) == (1, False)


def test_how_long_a_run_is_may_be_said_in_epochs_in_steps_or_by_the_user() -> None:
    def length(*overrides: str, **changes: Any) -> tuple[float, int]:
        recipe = imported(*overrides, **changes)
        return recipe.epochs, recipe.steps

    assert length(buffer={"total_epochs": 3}) == (3, 0)
    assert length(buffer={"total_epochs": 3, "total_steps": 7}) == (0, 7)
    assert length(buffer={"total_steps": 7}, trainer={"total_steps": 5}) == (0, 5)
    assert length("steps=4", buffer={"total_epochs": 3}) == (0, 4)
    assert length("epochs=0.5", buffer={"total_steps": 7}) == (0.5, 0)
    told = text_of(buffer={"total_epochs": 3}, trainer={"total_steps": 5})
    assert "\n# buffer.total_epochs: ends the training earlier" in told
    warmup = algorithm(optimizer={"lr": 1e-5, "lr_warmup_steps_ratio": 0.1})
    with pytest.raises(ImportRefusal, match=r"ratio 0.1 is a share of steps .*warmup_steps=…"):
        imported(**warmup)
    assert imported("optimizer.warmup_steps=3", **warmup).optimizer.warmup_steps == 3


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_the_imported_configuration_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    small = ("rollouts.groups=4", "rollouts.group_size=4", "rollouts.max_tokens=48", "epochs=0.1")
    file = tmp_path / "recipe.yaml"
    without_wandb = {"monitor": {"monitor_type": "tensorboard"}}
    file.write_text(text_of(*small, "evaluation.examples=4", **without_wandb))
    train(named_recipe(str(file)), run="imported")
    steps = read_metrics(tmp_path / "imported" / "metrics.jsonl")
    assert [step["rollouts/ok"] for step in steps] == [16, 16]


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ImportRefusal, match=r"unknown to Trinity-RFT 0\.6\.0: buffer\.batchsize, "):
        text_of(buffer={"batchsize": 1}, explorer={"rollout_model": {"engine_nums": 2}})


def test_the_environment_is_read_and_other_interpolations_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MODEL", "some/model")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert imported(model={"model_path": "${oc.env:MODEL}"}).model.base == "local/tiny-chat"
    values = merge_values(read_yaml(CONFIG), {"model": {"model_path": "${oc.env:MODEL}"}})
    assert '  base: "some/model"  #' in import_trinity("t.yaml", write_yaml(values))
    given = parsed("f", "project: '${oc.env:NOWHERE,./here}/runs'")
    assert given.get("project") == "./here/runs"
    with pytest.raises(ImportRefusal, match="needs the environment variable NOWHERE to be set"):
        parsed("f", "project: '${oc.env:NOWHERE}'").get("project")
    with pytest.raises(ImportRefusal, match=r"project has \$\{name\}, which is not resolved"):
        parsed("f", "project: '${name}'").get("project")


def test_a_variable_that_is_not_set_is_a_value_to_give_and_one_of_no_counterpart_is_not_read() -> (
    None
):
    values = {
        "model": {"model_path": "${oc.env:NOWHERE}"},
        "buffer": {"explorer_input": {"taskset": {"path": "${oc.env:NOWHERE}"}}},
        "checkpoint_root_dir": "${oc.env:NOWHERE}",
        "trainer": {"trainer_config": {"critic": {"size": "${trainer.trainer_config.actor.size}"}}},
    }
    text = write_yaml(merge_values(read_yaml(CONFIG), values))
    with pytest.raises(ImportRefusal) as refused:
        import_trinity("t.yaml", text)
    for key, ours in (
        ("model.model_path", "model.base"),
        ("buffer.explorer_input.taskset.path", "dataset.path"),
    ):
        said = f"{key} needs the environment variable NOWHERE to be set; give --set {ours}=…"
        assert said in str(refused.value)
    assert "checkpoint_root_dir" not in str(refused.value)
    assert imported(**values).model.base == "local/tiny-chat"


def test_a_variable_that_is_named_like_a_secret_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "quiet-please")
    for key in ("mode", "project"):
        with pytest.raises(UserError, match="named like a secret") as refused:
            text_of(**{key: "${oc.env:SERVICE_API_KEY}"})
        assert "quiet-please" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "ours", "told"),
    [
        ({"algorithm": {"sample_strategy": "default"}}, None, "algorithm.sample_strategy"),
        (with_buffer(enable=False), None, "replay_buffer.enable"),
        (with_buffer(enable=False, reuse_cooldown_time=9), None, "reuse_cooldown_time"),
        (with_buffer(enable=True, priority_fn="linear_decay"), None, "priority_fn"),
        (with_buffer(enable=True, reuse_cooldown_time=9), "optimizer.epochs=2", ""),
        ({"model": {"top_p": 1.0, "top_k": -1}}, None, "model.top_p"),
        ({"model": {"top_p": 0.9}}, "rollouts.temperature=0.7", ""),
        ({"model": {"repetition_penalty": 1.1, "min_response_tokens": 4}}, None, "penalty"),
        (pipeline(experience_pipeline={"operators": [PASS_RATES]}), None, "pipeline.operators"),
        (
            pipeline(experience_pipeline={"operators": [{"name": "reward_filter"}]}),
            "algorithm.rewards=select rollout_id, role, reward from rewards where reward > 0",
            "",
        ),
        (
            {"explorer": {"auxiliary_models": [{"model_path": "judge"}]}},
            "agent=gsm8k",
            "",
        ),
        (
            {"buffer": {"explorer_input": {"eval_tasksets": [{"name": "a"}, {"name": "b"}]}}},
            None,
            "eval_tasksets.name",
        ),
        ({"mode": "train", "buffer": {"batch_size": 1, "train_batch_size": 768}},
         ("rollouts.lag=2", "rollouts.groups=96"), ""),
    ],
)  # fmt: skip
def test_a_key_that_changes_nothing_is_said_and_one_that_does_is_settled_by_the_user(
    changes: dict[str, Any], ours: str | tuple[str, ...] | None, told: str
) -> None:
    if ours is None:
        assert f"{told}: " in text_of(**changes)
        return
    with pytest.raises(ImportRefusal, match="; give --set "):
        text_of(**changes)
    assert text_of(*([ours] if isinstance(ours, str) else ours), **changes)


def test_words_of_yaml_are_read_as_trinity_reads_them_and_those_of_its_table_as_names() -> None:
    assert known_keys().refused["algorithm.sample_strategy"].off[-3:] == (
        "default",
        "warmup",
        "mix",
    )
    text = CONFIG.replace("enable: true", "enable: on").replace("1.0e-05", "1e-5")
    assert import_trinity("t.yaml", text, OURS) == import_trinity("t.yaml", CONFIG, OURS)
    with pytest.raises(ImportRefusal, match="all weights are trained"):
        import_trinity("t.yaml", CONFIG.replace("enable: true", "enable: off"), OURS)


def test_pictures_and_a_file_that_is_no_yaml_are_refused() -> None:
    pictured = {"explorer_input": {"taskset": {"format": {"image_key": "images"}}}}
    with pytest.raises(ImportRefusal, match="image_key 'images' names pictures, and messages"):
        text_of(buffer=pictured)
    with pytest.raises(ImportRefusal, match=r"t.yaml is no YAML: line 2, column 1: the key mode"):
        import_trinity("t.yaml", "mode: both\nmode: both")


@pytest.mark.parametrize(
    ("name", "offset"),
    [*((name, 1) for name in TRINITY if name in ALGORITHMS), ("grpo", 0), ("mix", 0)],
)
def test_each_algorithm_of_trinity_is_imported(name: str, offset: int) -> None:
    teacher = ["algorithm.teacher.models=run@3"] if name in DISTILLED else []
    teacher += ["algorithm.expert.path=texts.jsonl"] if name in EXPERTS else []
    changes = algorithm(algorithm_type=name)
    made = imported(*teacher, synchronizer={"sync_offset": offset}, **changes).algorithm
    advantage, loss, kl = ALGORITHMS[name]
    assert made.advantage == ADVANTAGES[advantage].row
    expected = "ppo" if loss in ("ppo", *EXPERTS) and offset == 0 else LOSSES[loss].row
    assert made.loss == expected
    assert made.kl.coefficient == (0.001 if kl == "k2" else 0.0)
    if kl == "k2":
        ours = ("k2", "loss") if loss == "opmd" else ("k1", "advantage")
        assert (made.kl.estimator, made.kl.placement) == ours, "opmd halves what is in an advantage"


@pytest.mark.parametrize(
    ("name", "estimator", "placement"),
    [("k2", "k1", "advantage"), ("corrected_k3", "k1", "advantage"), ("k3", "k3", "loss")],
)
def test_a_kl_in_trinity_s_loss_is_imported_with_its_gradient(
    name: str, estimator: str, placement: str
) -> None:
    made = imported(**algorithm(kl_loss_fn=name, kl_loss_fn_args={"kl_coef": 0.02})).algorithm.kl
    assert (made.estimator, made.placement, made.coefficient) == (estimator, placement, 0.02)


def test_a_kl_in_trinity_s_reward_is_imported_there() -> None:
    penalized = algorithm(
        kl_loss_fn="none", kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.02}
    )
    made = imported(**penalized).algorithm.kl
    assert (made.estimator, made.placement, made.coefficient) == ("k1", "reward", 0.02)


def test_a_distillation_is_imported_with_its_teacher() -> None:
    explorer = {"auxiliary_models": [{"model_path": "Qwen/Qwen3-32B", "engine_num": 1}]}
    arguments = {"lambda_coef": 0.3, "kl_coef": 2, "temperature": 1.0}
    given = {"algorithm_type": "jsd", "advantage_fn_args": arguments, "repeat_times": 1}
    recipe = imported(explorer=explorer, **algorithm(**given))
    made, teacher = recipe.algorithm, recipe.algorithm.teacher
    assert recipe.rollouts.group_size == 1
    assert (teacher.models, teacher.divergence) == (("Qwen/Qwen3-32B",), "jsd")
    assert (teacher.coefficient, teacher.beta, made.advantage) == (2.0, 0.3, "zero")
    for beta, said in ((0, "reverse_kl"), (1, None)):
        given["advantage_fn_args"] = {"lambda_coef": beta}
        if said is None:
            with pytest.raises(ImportRefusal, match=r"lambda_coef 1 is the forward KL"):
                text_of(explorer=explorer, **algorithm(**given))
        else:
            made = imported(explorer=explorer, **algorithm(**given)).algorithm
            assert made.teacher.divergence == said
    with pytest.raises(ImportRefusal, match=r"auxiliary_models names 0 teachers.*teacher.models=…"):
        text_of(**algorithm(algorithm_type="on_policy_distill"))
    with pytest.raises(ImportRefusal, match="calls each as a role"):
        text_of(explorer=explorer)


def test_an_expert_is_imported_with_its_texts_and_its_share() -> None:
    arguments = {"mu_peak": 0.5, "mu_valley": 0.02, "mu_warmup_steps": 200, "mu_decay_steps": 400}
    buffer = {"path": "some/texts", "format": {"messages_key": "messages"}}
    given = {
        **algorithm(
            algorithm_type="mix_chord",
            policy_loss_fn_args=arguments,
            sample_strategy_args={"expert_data_ratio": 0.2, "sft_dataset_name": "answers"},
        ),
        "buffer": {
            "batch_size": 40,
            "train_batch_size": 320,
            "trainer_input": {"auxiliary_buffers": {"answers": buffer}},
        },
    }
    recipe = imported(**given)
    expert = recipe.algorithm.expert
    assert (expert.path, expert.loss, expert.trained) == ("hub:some/texts", "phi", "last_message")
    assert (expert.share, expert.final_share) == (0.5, 0.02)
    assert (expert.warmup_steps, expert.decay_steps) == (200, 400)
    assert (expert.examples, recipe.rollouts.groups, recipe.rollouts.group_size) == (64, 32, 8)
    arguments["mu_decay_steps"] = 0
    with pytest.raises(
        ImportRefusal, match=r"from mu_peak 0.5 to mu_valley 0.02 at once, and a sh"
    ):
        text_of(**given)
    arguments["mu_decay_steps"] = 400
    buffer["format"] = {}
    assert imported(**given).algorithm.expert.columns == {"messages": "message"}
    buffer["format"] = {"prompt_type": "plaintext"}
    with pytest.raises(ImportRefusal, match="prompt_type plaintext is of no expert's texts; write"):
        text_of(**given)
    given["buffer"]["trainer_input"] = {}
    with pytest.raises(ImportRefusal, match=r"answers\.path is missing; give --set algorithm.exp"):
        text_of(**given)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        (algorithm(policy_loss_fn_args={"clip_range_high": 0.28}), "clip_high_threshold", 1.28),
        (algorithm(policy_loss_fn_args={"clip_range": 0.1}), "clip_low_threshold", 0.9),
        (algorithm(policy_loss_fn_args={"clip_ratio_c": 5}), "dual_clip", 5.0),
        (
            algorithm(algorithm_type="rec", policy_loss_fn_args={"clip_mode": "one-side"}),
            "clip",
            "one_side",
        ),
    ],
)
def test_arguments_of_a_loss_become_its_settings(
    changes: dict[str, Any], key: str, value: object
) -> None:
    assert imported(**changes).algorithm.loss_settings[key] == value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"synchronizer": {"sync_interval": 4}}, "rollouts between 1 and 4 updates old"),
        ({"synchronizer": {"sync_style": "fully_async"}}, "sync_style fully_async moves weights"),
        ({"algorithm": {"repeat_times": 1}}, "repeat_times 1 compares no rollouts"),
        (
            {"buffer": {"explorer_input": {"default_reward_fn_type": "math_dapo_reward"}}},
            "default_reward_fn_type 'math_dapo_reward' is the reward of no agent",
        ),
        ({"mode": "bench"}, "mode bench scores checkpoints; run ratchet evaluate"),
        ({"model": {"tinker": {"enable": False}}}, "all weights are trained"),
        ({"model": {"top_p": 0.9}}, "model.top_p 0.9 cuts the distribution"),
        ({"buffer": {"train_batch_size": 96}}, "train_batch_size leaves 96 rollouts a step"),
        (algorithm(kl_loss_fn="k1"), "kl_loss_fn k1 has no gradient that keeps .*; give k2"),
        *(
            (algorithm(kl_loss_fn="none", kl_penalty_fn=name), f"penalty_fn {name} .*; give k1")
            for name in ("k2", "abs")
        ),
        (algorithm(algorithm_type="ppo"), "algorithm_type ppo has no counterpart; give "),
        (algorithm(advantage_fn="clipv"), "clipv has no counterpart"),
        (algorithm(kl_loss_fn_args={"adaptive": True}), "kl_loss_fn_args.adaptive"),
        (algorithm(advantage_fn_args={"rank_penalty": 0.2}), "rank_penalty 0.2 has no counter"),
        (algorithm(policy_loss_fn_args={"clip": 0.2}), "has clip, which ppo does not read"),
        (algorithm(optimizer={"lr_scheduler_type": "linear"}), "lr_scheduler_type linear is ref"),
    ],
)
def test_what_no_recipe_says_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ImportRefusal, match=said):
        text_of(**changes)


def test_a_value_of_the_user_settles_what_the_file_cannot_say() -> None:
    assert imported("rollouts.lag=2", synchronizer={"sync_interval": 4}).rollouts.lag == 2
    given = imported("rollouts.group_size=5", algorithm={"repeat_times": 1})
    assert given.rollouts.group_size == 5
    assert imported("algorithm.preset=grpo", **algorithm(algorithm_type="ppo")).algorithm.preset


def test_the_weights_of_a_lora_of_verl_are_imported_too() -> None:
    lora = [{"name": "lora", "lora_rank": 32, "lora_alpha": 32}]
    changes = {"tinker": {"enable": False}, "lora_configs": lora}
    recipe = imported(model=changes)
    assert (recipe.model.lora_rank, recipe.algorithm.aggregation) == (32, "token_mean")


def test_cosine_and_warm_up_are_those_of_the_optimizer() -> None:
    optimizer = {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.2}
    made = imported("steps=10", algorithm={"optimizer": optimizer}).optimizer
    assert (made.schedule, made.warmup_steps, made.final_fraction) == ("cosine", 2, 0.01)


def test_the_order_of_the_tasks_is_imported() -> None:
    selector = {"selector_type": "shuffle"}
    taskset = {"explorer_input": {"taskset": {"data_selector": selector}}}
    assert imported(buffer=taskset).dataset.order == "shuffled"
    selector["selector_type"] = "difficulty_based"
    with pytest.raises(ImportRefusal, match=r"difficulty_based is no order.*--set dataset.order"):
        text_of(buffer=taskset)
