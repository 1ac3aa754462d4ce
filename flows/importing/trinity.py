"""A recipe of a Trinity-RFT 0.6.0 configuration, with its implicit defaults made explicit."""

from math import floor

from flows.importing.translation import Translation
from flows.importing.trinity_algorithm import translate_algorithm
from flows.importing.trinity_file import TrinityFile, known_keys
from flows.recipe.section import MOST_STEPS
from tasks.storage.keys import Section

AGENTS = dict.fromkeys(
    ("math_workflow", "async_math_workflow", "math_boxed_workflow", "async_math_boxed_workflow"),
    "gsm8k",
)
"""Workflow of Trinity → the agent that plays the same task."""

MODES = {
    "explore": "plays rollouts and trains nothing; run ratchet dryrun --keep or ratchet evaluate",
    "train": "trains recorded rollouts; run ratchet replay",
    "bench": "scores checkpoints; run ratchet evaluate",
    "serve": "serves a model; run ratchet serve",
}
TINKER_EPS = 1e-12
"""Adam's eps where a client of Tinker names none, as Trinity does."""

TASKSET = "buffer.explorer_input.taskset"
EPOCHS = "buffer.total_epochs"


def translate(file: TrinityFile, chosen: Section) -> Translation:
    """Translate a file; `chosen` are the values that the user gives in place of its own."""
    out = Translation(frozenset(chosen))
    _refuse_what_is_on(file, out)
    _translate_task(file, out)
    _translate_order(file, out)
    _translate_model(file, out)
    _translate_rollouts(file, out)
    _translate_lag(file, out)
    translate_algorithm(file, out)
    _translate_steps(file, out, chosen)
    _translate_optimizer(file, out, chosen)
    _translate_saving(file, out)
    return out


def _refuse_what_is_on(file: TrinityFile, out: Translation) -> None:
    """Tell what each key without a counterpart would have done; refuse it if it is needed."""
    known = known_keys()
    for key, value in file.given.items():
        if key in known.defaults:
            continue
        if key in known.off and value not in known.off[key]:
            out.refuse(f"{key} {value!r} {known.effects[key]}")
        else:
            out.left_out[key] = known.effects[key]
    mode = str(file.get("mode"))
    if mode in MODES:
        out.refuse(f"mode {mode} {MODES[mode]}")


ORDERS = {"sequential": "sequential", "shuffle": "shuffled", "random": "shuffled"}
"""Selector of tasks → order of the dataset, shuffled anew for each pass."""


def _translate_task(file: TrinityFile, out: Translation) -> None:
    workflow = f"{TASKSET}.default_workflow_type"
    if file.get(workflow) is None:
        workflow = "buffer.explorer_input.default_workflow_type"
    name = file.get(workflow)
    if name in AGENTS:
        out.give("agent", AGENTS[name], f"{workflow} {name}, whose words and reward are its own")
    else:
        out.refuse(f"{workflow} {name} has no agent here", ["agent"])
    path, subset = file.get(f"{TASKSET}.path"), file.get(f"{TASKSET}.subset_name")
    if path is None:
        out.refuse(f"{TASKSET}.path is missing", ["dataset.path"])
    else:
        local = str(path).startswith((".", "/")) or str(path).count("/") != 1
        named = str(path) if local else "/".join(filter(None, [f"hub:{path}", subset]))
        out.give("dataset.path", named, f"{TASKSET}.path and subset_name")
    if (split := file.get(f"{TASKSET}.split")) != "train":
        out.refuse(
            f"{TASKSET}.split {split}: the rows of split train are trained", ["dataset.path"]
        )


def _translate_order(file: TrinityFile, out: Translation) -> None:
    selector, columns = (
        f"{TASKSET}.data_selector.{key}" for key in ("selector_type", "feature_keys")
    )
    name, difficulties = file.get(selector), file.get(columns)
    if name in ORDERS:
        out.give("dataset.order", ORDERS[name], file.reason(selector))
    elif name == "offline_easy2hard" and difficulties:
        out.give("dataset.order", "easy_to_hard", selector)
        out.give("dataset.difficulty", difficulties[0], f"the first of {columns}")
    else:
        out.refuse(
            f"{selector} {name} is no order of a recipe; pass_rate is one by measured rewards",
            ["dataset.order"],
        )


def _translate_model(file: TrinityFile, out: Translation) -> None:
    out.give("model.base", file.get("model.model_path"), file.reason("model.model_path"))
    template, path = file.get("model.custom_chat_template"), file.get("model.chat_template_path")
    if path is not None:
        out.give("model.renderer", f"jinja:{path}", "model.chat_template_path")
    elif template is not None:
        out.give("model.renderer", f"jinja:{template}", "model.custom_chat_template")
    else:
        out.refuse(
            "model.custom_chat_template is missing, and Trinity then takes the model's own; a "
            "recipe names its renderer, such as llama-3 or qwen3",
            ["model.renderer"],
        )
    if file.get("model.tinker.enable"):
        rank = "model.tinker.rank"
        out.give("model.lora_rank", file.get(rank), f"{file.reason(rank)}; its guide says 32")
        for ours, theirs in (("attention", "attn"), ("mlp", "mlp"), ("unembedding", "unembed")):
            key = f"model.tinker.train_{theirs}"
            out.give(f"model.train_{ours}", file.get(key), file.reason(key))
    elif any(key.startswith("model.lora_configs.") for key in file.given):
        rank = "model.lora_configs.lora_rank"
        out.give("model.lora_rank", file.get(rank), file.reason(rank))
    else:
        out.refuse(
            "model.tinker.enable is false and model.lora_configs is missing, so that all weights "
            "are trained, and a Tinker service trains LoRA",
            ["model.lora_rank"],
        )
    seeds = ("model.tinker.seed", "explorer.rollout_model.seed")
    seed = next(key for key in seeds if file.get(key) is not None or key == seeds[-1])
    out.give("seed", file.get(seed), f"{file.reason(seed)}; all seeds derive from it")


def _translate_rollouts(file: TrinityFile, out: Translation) -> None:
    groups, size = file.number("buffer.batch_size"), file.number("algorithm.repeat_times")
    out.give("rollouts.groups", int(groups), file.reason("buffer.batch_size"))
    if size < 2:
        out.refuse(
            f"algorithm.repeat_times {size:g} compares no rollouts with each other",
            ["rollouts.group_size"],
        )
    else:
        reason = file.reason("algorithm.repeat_times")
        out.give("rollouts.group_size", int(size), reason)
    trained = file.number("buffer.train_batch_size") or groups * size
    if trained != groups * size:
        out.refuse(
            f"buffer.train_batch_size {trained:g} is not buffer.batch_size × "
            f"algorithm.repeat_times, {groups * size:g}",
            ["optimizer.substeps"],
        )
    runners = file.number("explorer.runner_per_model")
    runners *= file.number("explorer.rollout_model.engine_num")
    concurrency = int(min(runners * max(size, 1), groups * max(size, 1)))
    reason = "explorer.runner_per_model × engine_num groups at a time"
    out.give("rollouts.concurrency", max(concurrency, 1), reason)
    timeout = "explorer.max_timeout"
    reason = f"{file.reason(timeout)}; only the agent's own time counts"
    out.give("rollouts.timeout_seconds", file.number(timeout), reason)
    retries = int(file.number("explorer.max_retry_times"))
    reason = file.reason("explorer.max_retry_times")
    out.give("rollouts.partial_groups", "wait" if retries else "use_rest", reason)
    out.give("rollouts.attempts", 1 + retries, reason)
    _translate_sampling(file, out)


def _translate_sampling(file: TrinityFile, out: Translation) -> None:
    own = f"{TASKSET}.rollout_args.temperature"
    key = own if file.get(own) is not None else "model.temperature"
    out.give("rollouts.temperature", file.number(key), file.reason(key))
    for key in (f"{TASKSET}.rollout_args.max_tokens", "model.max_response_tokens"):
        if file.get(key) is not None:
            out.give("rollouts.max_tokens", int(file.number(key)), key)
            break
    else:
        longest, prompt = file.get("model.max_model_len"), file.get("model.max_prompt_tokens")
        if longest is None:
            said = "model.max_response_tokens is missing, and Trinity asks the model's folder"
            out.refuse(said, ["rollouts.max_tokens"])
        else:
            left = int(longest) - (int(longest) // 2 if prompt is None else int(prompt))
            out.give("rollouts.max_tokens", left, "what model.max_model_len leaves for answers")
    if (prompt := file.get("model.max_prompt_tokens")) is not None:
        out.left_out["model.max_prompt_tokens"] = (
            f"cuts prompts at {prompt} tokens, and leaves their rollouts untrained; a prompt that "
            "does not fit the model is refused, and its rollout fails"
        )


def _translate_lag(file: TrinityFile, out: Translation) -> None:
    """Translate the offset of synchronization, which is the lag if weights move each step."""
    style = str(file.get("synchronizer.sync_style")).lower()
    if style != "fixed":
        out.refuse(
            f"synchronizer.sync_style {style} moves weights when one side asks; rollouts.order "
            "arrival with a lag is nearest",
            ["rollouts.lag"],
        )
        return
    offset = int(file.number("synchronizer.sync_offset"))
    for side in ("", "explorer_", "trainer_"):
        key = f"synchronizer.{side}sync_interval"
        if file.get(key) is not None and (interval := file.number(key)) != 1:
            out.refuse(
                f"{key} {interval:g} makes rollouts between {offset} and "
                f"{offset + interval - 1:g} updates old, and a lag is one number",
                ["rollouts.lag"],
            )
            return
    reason = "at most as many updates in Trinity, exactly as many here"
    out.give("rollouts.lag", offset, f"{file.reason('synchronizer.sync_offset')}; {reason}")


def _translate_steps(file: TrinityFile, out: Translation, chosen: Section) -> None:
    limits = {
        key: int(file.number(key))
        for key in ("buffer.total_steps", "trainer.total_steps")
        if file.get(key) is not None
    }
    if {"steps", "epochs"} & chosen.keys():
        return
    if limits:
        reason = min(limits, key=lambda key: limits[key])
        out.give("steps", limits[reason], reason)
        if "buffer.total_steps" not in limits and EPOCHS in file.given:
            out.left_out[EPOCHS] = "ends the training earlier where its passes over the data do"
    else:
        reason = f"{file.reason(EPOCHS)}, whose last step Trinity leaves out unless it is whole"
        out.give("epochs", file.number(EPOCHS), reason)


def _translate_optimizer(file: TrinityFile, out: Translation, chosen: Section) -> None:
    section = "algorithm.optimizer"
    first, second = file.get(f"{section}.betas")
    out.give("optimizer.learning_rate", file.number(f"{section}.lr"), file.reason(f"{section}.lr"))
    for key, beta in (("beta1", first), ("beta2", second)):
        out.give(f"optimizer.{key}", float(beta), file.reason(f"{section}.betas"))
    out.give("optimizer.eps", TINKER_EPS, "Tinker's default, since Trinity names none")
    for ours, key in (
        ("weight_decay", f"{section}.weight_decay"),
        ("grad_clip_norm", "trainer.grad_clip"),
    ):
        out.give(f"optimizer.{ours}", file.number(key), file.reason(key))
    old = f"{section}.warmup_style"
    key = old if file.get(old) is not None else f"{section}.lr_scheduler_type"
    schedule = file.get(key)
    if schedule not in ("constant", "cosine"):
        out.refuse(f"{key} {schedule} is refused by Trinity too", ["optimizer.schedule"])
        return
    out.give("optimizer.schedule", schedule, file.reason(key))
    if schedule == "cosine":
        key = f"{section}.min_lr_ratio"
        out.give("optimizer.final_fraction", file.number(key), file.reason(key))
    warmup = file.number(f"{section}.lr_warmup_steps")
    reason = f"{section}.lr_warmup_steps"
    if warmup < 0:
        reason = f"{section}.lr_warmup_steps_ratio"
        steps = int(str(chosen.get("steps", out.values.get("steps", (0, ""))[0])))
        warmup = floor(file.number(reason) * steps)
        if file.number(reason) and not steps:
            said = f"{reason} {file.number(reason):g} is a share of steps that epochs do not tell"
            out.refuse(said, ["optimizer.warmup_steps", "steps"])
    out.give("optimizer.warmup_steps", int(warmup), file.reason(reason))


def _translate_saving(file: TrinityFile, out: Translation) -> None:
    every, reason = int(file.number("trainer.save_interval")), file.reason("trainer.save_interval")
    out.give("checkpoints.every", every or MOST_STEPS, reason if every else "the last alone")
    evaluates = any(key.startswith("buffer.explorer_input.eval_tasksets.") for key in file.given)
    every = int(file.number("explorer.eval_interval")) if evaluates else 0
    reason = file.reason("explorer.eval_interval") if evaluates else "no eval_tasksets"
    out.give("evaluation.every", every, reason)
    if evaluates:
        key = "buffer.explorer_input.eval_tasksets.repeat_times"
        out.give("evaluation.rollouts", int(file.number(key)), file.reason(key))
    monitor = file.get("monitor.monitor_type")
    if monitor == "wandb":
        out.give("tracking.project", file.get("project"), file.reason("project"))
    elif "monitor.monitor_type" in file.given:
        out.left_out["monitor.monitor_type"] = (
            f"logs to {monitor}; all metrics of each step are in the run's folder"
        )
