"""A recipe of a Trinity-RFT 0.6.0 configuration, with its implicit defaults made explicit."""

import re
from collections.abc import Sequence
from math import floor
from typing import cast

from ratchet.adapters.errors import listed
from ratchet.adapters.redaction import quote
from ratchet.flows.importing.trinity_algorithm import (
    BUFFERS,
    RAFT,
    SAMPLING,
    TEACHINGS,
    expert_texts,
    translate_algorithm,
)
from ratchet.flows.importing.trinity_file import (
    EVALUATED,
    ImportRefusal,
    Translation,
    TrinityFile,
    known_keys,
    read_values,
    trinity_file,
    write_recipe,
)
from ratchet.flows.recipe.loading import parse_overrides
from ratchet.flows.recipe.plan import FLOW_RECIPES
from ratchet.tasks.settings.section import MOST_STEPS, TABLES
from ratchet.tasks.storage.dotted_keys import Section, flatten

AGENTS = dict.fromkeys(
    ("math_workflow", "async_math_workflow", "math_boxed_workflow", "async_math_boxed_workflow"),
    "gsm8k",
)
"""Workflow of Trinity → the agent that plays the same task."""
REWARDS = ("math_reward", "math_boxed_reward")
"""Rewards of Trinity that compare the final answer of such a task, as the agent does."""

MODES = {
    "explore": "plays rollouts and trains nothing; import the file that trains them, or run "
    "ratchet dryrun --keep or ratchet evaluate",
    "train": "trains rollouts that another process plays, and a recipe plays its own (ratchet "
    "replay trains those of a run again); give how old they are",
    "bench": "scores checkpoints; run ratchet evaluate",
    "serve": "serves a model; run ratchet serve",
}
TINKER_EPS = 1e-12
"""Adam's eps where a client of Tinker names none, as Trinity does."""

SEED = "explorer.rollout_model.seed"
INPUT = "buffer.explorer_input"
TASKSET = f"{INPUT}.taskset"
EPOCHS = "buffer.total_epochs"
OPTIMIZER = "algorithm.optimizer"
ORDERS = {"sequential": "sequential", "shuffle": "shuffled", "random": "shuffled"}
"""Selector of tasks → order of the dataset, shuffled anew for each pass."""


SIZES = {"rollouts.groups": "buffer.batch_size", "rollouts.group_size": "algorithm.repeat_times"}
"""Key of a recipe → Trinity's key for the same number."""


def import_trinity(name: str, text: str, overrides: Sequence[str] = ()) -> str:
    """Make the text of a recipe of a Trinity-RFT file, with each `section.key=value` over it.

    A file with stages becomes a recipe of stages. There an override changes each stage that has
    its section; `stages.NAME.recipe.section.key=value` changes one stage.
    """
    head = [f"# A recipe made of {name}; `ratchet train` takes this file."]
    try:
        values = read_values(name, text)
        stages = split_stages(values)
        if stages is None:
            return "\n".join([*head, *_translate(trinity_file(name, values), overrides)]) + "\n"
        lines = [*head, "flow: stages", "stages:"]
        for stage, own in stages.items():
            file = trinity_file(f"stage {stage}", own)
            flow = flow_of(_algorithm_of(file))
            given = [found for one in overrides if (found := override_of(one, stage, flow))]
            written = _translate(file, given)
            lines += [f"  - name: {stage}", f"    flow: {flow}", "    recipe:"]
            lines += [f"      {line}".rstrip() for line in written if not line.startswith("flow:")]
    except ImportRefusal as refusal:
        raise ImportRefusal(f"{name} cannot be imported: {refusal}") from None
    return "\n".join(lines) + "\n"


def _algorithm_of(file: TrinityFile) -> str:
    return str(file.get("algorithm.algorithm_type")).lower()


def _translate(file: TrinityFile, overrides: Sequence[str]) -> list[str]:
    algorithm = _algorithm_of(file)
    chosen = flatten(parse_overrides(overrides, FLOW_RECIPES[flow_of(algorithm)]), TABLES)
    out = Translation(file, chosen)
    _refuse_what_is_on(out, algorithm)
    _translate_model(out)
    if algorithm in GIVEN_FLOWS:
        translate_given(out, algorithm)
    else:
        _translate_task(out)
        _translate_order(out)
        _translate_rollouts(out)
        _translate_sampling(out)
        _translate_lag(out)
        translate_algorithm(out)
        _translate_evaluation(out)
    _translate_steps(out)
    _translate_optimizer(out)
    _translate_schedule(out)
    _translate_saving(out)
    return write_recipe(out, overrides)


def _refuse_what_is_on(out: Translation, algorithm: str) -> None:
    """Tell what each key without a counterpart would have done; refuse it if it is needed."""
    known, given = known_keys(), algorithm in GIVEN_FLOWS
    for key, value in out.file.given.items():
        if given and key.startswith(ROLLOUT_KEYS) and key != SEED:
            out.left_out[key] = "is of rollouts, of which none is played"
        elif given and key.startswith(f"{BUFFER}.") and key not in known.defaults:
            out.left_out[key] = "says how Trinity reads the rows; they are read as a file"
        elif key in known.defaults and (given or key not in known.effects):
            continue
        elif (row := known.refused.get(key)) is None:
            out.left_out[key] = known.effects[key]
        elif row.is_off(out.file.get(key) if isinstance(value, str) else value, out.file):
            out.left_out[key] = "changes nothing with these values"
        else:
            out.refuse(f"{key} {quote(value, key)} {row.effect}", *row.overridden_by)
    mode = str(out.file.get("mode"))
    if mode in MODES and not given:
        out.refuse(f"mode {mode} {MODES[mode]}", *(["rollouts.lag"] if mode == "train" else []))


def _translate_task(out: Translation) -> None:
    file = out.file
    workflow = file.first(f"{TASKSET}.default_workflow_type", f"{INPUT}.default_workflow_type")
    name = file.get(workflow)
    rewards = (file.given.get(f"{of}.default_reward_fn_type") for of in (TASKSET, INPUT))
    reward = next(filter(None, rewards), REWARDS[0])
    if name in AGENTS and reward in REWARDS:
        out.give("agent", AGENTS[name], f"{workflow} {name}, whose words and reward are its own")
    elif name in AGENTS:
        out.refuse(
            f"default_reward_fn_type {quote(reward)} is the reward of no agent here", "agent"
        )
    else:
        out.refuse(f"{workflow} {name} has no agent here", "agent")
    out.give_path(TASKSET)
    if (split := file.get(f"{TASKSET}.split")) != "train":
        out.refuse(f"{TASKSET}.split {split}: the rows of split train are trained", "dataset.path")


def _translate_order(out: Translation) -> None:
    selector = f"{TASKSET}.data_selector.selector_type"
    if (name := out.file.get(selector)) in ORDERS:
        out.give("dataset.order", ORDERS[name], out.file.reason(selector))
    else:
        said = f"{selector} {name} is no order of a recipe; sort the file, and give sequential"
        out.refuse(said, "dataset.order")


def _translate_model(out: Translation) -> None:
    out.copy("model.base", "model.model_path")
    template, path = "model.custom_chat_template", "model.chat_template_path"
    for key in (path, template):
        if (value := out.file.get(key)) is not None:
            out.give("model.renderer", f"jinja:{value}", key)
            break
    if out.file.get("model.enable_thinking") is not None:
        out.copy("model.thinking", "model.enable_thinking")
    if out.file.get("model.tinker.enable"):
        out.copy("model.lora_rank", "model.tinker.rank", note="; its guide says 32")
        for ours, theirs in (("attention", "attn"), ("mlp", "mlp"), ("unembedding", "unembed")):
            out.copy(f"model.train_{ours}", f"model.tinker.train_{theirs}")
    elif any(key.startswith("model.lora_configs.") for key in out.file.given):
        out.copy("model.lora_rank", "model.lora_configs.lora_rank")
    else:
        out.refuse(
            "model.tinker.enable is false and model.lora_configs is missing, so that all weights "
            "are trained, and a Tinker service trains LoRA",
            "model.lora_rank",
        )
    seed = out.file.first("model.tinker.seed", SEED)
    out.copy("seed", seed, note="; all seeds derive from it")


def _translate_rollouts(out: Translation) -> None:
    file = out.file
    groups, size = (
        float(str(out.chosen[ours])) if ours in out.chosen else file.number(theirs)
        for ours, theirs in SIZES.items()
    )
    trained = file.number("buffer.train_batch_size") or groups * size
    if expert := expert_texts(out):
        trained -= expert
        groups = trained / size
        reason = "what the expert's texts leave of the batch, by algorithm.repeat_times"
        out.give("rollouts.groups", int(groups), reason)
    else:
        out.copy("rollouts.groups", "buffer.batch_size", int)
        if file.get(BUFFERS) or file.get(SAMPLING):
            out.refuse(f"{BUFFERS} and {SAMPLING} have no counterpart without an expert")
    if size < 2 and file.get("algorithm.algorithm_type") not in (*TEACHINGS, RAFT):
        out.refuse(
            f"algorithm.repeat_times {size:g} compares no rollouts with each other",
            "rollouts.group_size",
        )
    else:
        out.copy("rollouts.group_size", "algorithm.repeat_times", int)
    if trained != (played := int(groups) * size):
        fewer, more = "optimizer.substeps", "rollouts.groups"
        out.refuse(
            f"buffer.train_batch_size leaves {trained:g} rollouts a step (or calls, if the "
            f"workflow counts each by itself), which are not {int(groups)} groups × "
            f"algorithm.repeat_times, {played:g}",
            *((more, fewer) if trained > played else (fewer, more)),
        )
    runners = file.number("explorer.runner_per_model")
    runners *= file.number("explorer.rollout_model.engine_num")
    concurrency = max(int(min(runners, groups) * max(size, 1)), 1)
    reason = "explorer.runner_per_model × engine_num groups at a time"
    out.give("rollouts.concurrency", concurrency, reason)
    note = "; only the agent's own time counts"
    out.copy("rollouts.timeout_seconds", "explorer.max_timeout", float, note)
    retries = int(file.number("explorer.max_retry_times"))
    out.give("rollouts.attempts", 1 + retries, file.reason("explorer.max_retry_times"))


def _translate_sampling(out: Translation) -> None:
    file = out.file
    temperature = file.first(f"{TASKSET}.rollout_args.temperature", "model.temperature")
    out.copy("rollouts.temperature", temperature, float)
    longest, prompt = (
        None if file.get(key) is None else int(file.number(key))
        for key in ("model.max_model_len", "model.max_prompt_tokens")
    )
    answer = file.first(f"{TASKSET}.rollout_args.max_tokens", "model.max_response_tokens")
    if file.get(answer) is not None:
        out.copy("rollouts.max_tokens", answer, int)
    elif longest is None:
        said = "model.max_response_tokens is missing, and Trinity asks the model's folder"
        out.refuse(said, "rollouts.max_tokens")
    else:
        left = longest - (longest // 2 if prompt is None else prompt)
        out.give("rollouts.max_tokens", left, "what model.max_model_len leaves for answers")
    if prompt is not None:
        out.left_out["model.max_prompt_tokens"] = (
            f"cuts prompts at {prompt} tokens, and leaves their rollouts untrained; a prompt that "
            "does not fit the model is refused, and its rollout fails"
        )


def _translate_lag(out: Translation) -> None:
    """Translate the offset of synchronization, which is the lag if weights move each step."""
    file = out.file
    style = str(file.get("synchronizer.sync_style")).lower()
    if style != "fixed":
        out.refuse(
            f"synchronizer.sync_style {style} moves weights when one side asks; a lag, which "
            "is exact, is nearest",
            "rollouts.lag",
        )
        return
    offset = int(file.number("synchronizer.sync_offset"))
    for side in ("", "explorer_", "trainer_"):
        key = f"synchronizer.{side}sync_interval"
        if file.get(key) is not None and (interval := file.number(key)) != 1:
            out.refuse(
                f"{key} {interval:g} makes rollouts between {offset} and "
                f"{offset + interval - 1:g} updates old, and a lag is one number",
                "rollouts.lag",
            )
            return
    note = "; at most as many updates in Trinity, exactly as many here"
    out.copy("rollouts.lag", "synchronizer.sync_offset", int, note)


def _translate_steps(out: Translation) -> None:
    file = out.file
    limits = {
        key: int(file.number(key))
        for key in ("buffer.total_steps", "trainer.total_steps")
        if file.get(key) is not None
    }
    if {"steps", "epochs"} & out.chosen.keys():
        return
    if limits:
        out.copy("steps", min(limits, key=lambda key: limits[key]), int)
        if "buffer.total_steps" not in limits and EPOCHS in file.given:
            out.left_out[EPOCHS] = "ends the training earlier where its passes over the data do"
    else:
        note = ", whose last step Trinity leaves out unless it is whole"
        out.copy("epochs", EPOCHS, float, note)


def _translate_optimizer(out: Translation) -> None:
    out.copy("optimizer.learning_rate", f"{OPTIMIZER}.lr", float)
    betas = out.file.get(theirs := f"{OPTIMIZER}.betas")
    for key, beta in zip(("beta1", "beta2"), betas, strict=True):
        out.give(f"optimizer.{key}", float(beta), out.file.reason(theirs))
    out.give("optimizer.eps", TINKER_EPS, "Tinker's default, since Trinity names none")
    out.copy("optimizer.weight_decay", f"{OPTIMIZER}.weight_decay", float)
    out.copy("optimizer.grad_clip_norm", "trainer.grad_clip", float)


def _translate_schedule(out: Translation) -> None:
    file = out.file
    key = file.first(f"{OPTIMIZER}.warmup_style", f"{OPTIMIZER}.lr_scheduler_type")
    schedule = file.get(key)
    if schedule not in ("constant", "cosine"):
        out.refuse(f"{key} {schedule} is refused by Trinity too", "optimizer.schedule")
        return
    out.copy("optimizer.schedule", key)
    if schedule == "cosine":
        out.copy("optimizer.final_fraction", f"{OPTIMIZER}.min_lr_ratio", float)
    key = f"{OPTIMIZER}.lr_warmup_steps"
    warmup = file.number(key)
    if warmup < 0:
        key = f"{OPTIMIZER}.lr_warmup_steps_ratio"
        share = file.number(key)
        steps = int(str(out.value_of("steps") or 0))
        warmup = floor(share * steps)
        if share and not steps:
            said = f"{key} {share:g} is a share of steps that epochs do not tell"
            out.refuse(said, "optimizer.warmup_steps", "steps")
    out.give("optimizer.warmup_steps", int(warmup), file.reason(key))


def _translate_evaluation(out: Translation) -> None:
    if any(key.startswith(f"{EVALUATED}.") for key in out.file.given):
        out.copy("evaluation.every", "explorer.eval_interval", int)
        note = "; of the first data set"
        out.copy("evaluation.rollouts", f"{EVALUATED}.repeat_times", int, note)
    else:
        out.give("evaluation.every", 0, "no eval_tasksets")


def _translate_saving(out: Translation) -> None:
    file = out.file
    every, reason = int(file.number("trainer.save_interval")), file.reason("trainer.save_interval")
    out.give("checkpoints.every", every or MOST_STEPS, reason if every else "the last alone")
    monitor = file.get("monitor.monitor_type")
    if monitor == "wandb":
        out.copy("tracking.project", "project")
    elif "monitor.monitor_type" in file.given:
        out.left_out["monitor.monitor_type"] = (
            f"logs to {monitor}; all metrics of each step are in the run's folder"
        )


STAGE_KEYS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
"""Sections that a stage may have: each takes the place of the whole section of the file."""


def split_stages(values: Section) -> dict[str, Section] | None:
    """Return the values of each stage, as a file's would be; None for a file without stages."""
    if not (given := values.get("stages")):
        return None
    shared = {key: value for key, value in values.items() if key != "stages"}
    stages: dict[str, Section] = {}
    listed_stages = cast(Sequence[Section], given if isinstance(given, list) else [given])
    for place, stage in enumerate(listed_stages):
        if strange := sorted(stage.keys() - {"stage_name", *STAGE_KEYS}):
            raise ImportRefusal(f"stages[{place}] has {listed(strange)}; Trinity knows none")
        sections = {key: value for key, value in stage.items() if key in STAGE_KEYS and value}
        named = re.sub(r"\W", "_", str(stage.get("stage_name") or f"stage_{place}"), flags=re.A)
        stages[named] = {**shared, **sections}
    return stages


def override_of(override: str, stage: str, flow: str) -> str:
    """Return an override as a stage's recipe takes it; empty if it is meant for other stages."""
    if override.startswith("stages."):
        own = f"stages.{stage}.recipe."
        return override.removeprefix(own) if override.startswith(own) else ""
    section = override.partition("=")[0].partition(".")[0]
    return override if section in FLOW_RECIPES[flow].model_fields else ""


GIVEN_FLOWS = {"sft": "finetune", "cpt": "finetune", "dpo": "prefer"}
"""Algorithm of Trinity that trains on texts or pairs → the flow that does."""

NORMALISATIONS = {"token-mean": "token", "seq-mean-token-mean": "example"}

BUFFER = "buffer.trainer_input.experience_buffer"
FORMAT = f"{BUFFER}.format"
TOOLS, PAIR = {"tools": "tools_key"}, {"chosen": "chosen_key", "rejected": "rejected_key"}
COLUMNS = {
    ("finetune", "messages"): {"messages": "messages_key", **TOOLS},
    ("finetune", "plaintext"): {"prompt": "prompt_key", "completion": "response_key", **TOOLS},
    ("prefer", "messages"): {"prompt": "messages_key", **PAIR},
    ("prefer", "plaintext"): {"prompt": "prompt_key", **PAIR},
}
"""Flow and prompt_type → our columns, with Trinity's key that names each."""
CPT = {"text": "prompt_key"}
ROLLOUT_KEYS = (
    *("buffer.batch_size", "buffer.explorer_input.", "explorer.", "synchronizer."),
    *("algorithm.repeat_times", "algorithm.advantage_fn", "algorithm.kl_penalty_fn"),
    *("algorithm.entropy_loss_fn", "model.temperature", "model.max_prompt_tokens"),
    "model.max_response_tokens",
)
"""Beginnings of keys that say how rollouts are played and compared."""
SETTINGS = {"beta": ("beta", 0.1), "label_smoothing": ("smoothing", 0.0)}
"""Argument of Trinity's dpo → the setting of ours, and Trinity's default."""


def flow_of(algorithm: str) -> str:
    return GIVEN_FLOWS.get(algorithm, "train")


def translate_given(out: Translation, algorithm: str) -> None:
    """Translate the rows, the batch and the loss of texts or pairs."""
    out.give("flow", GIVEN_FLOWS[algorithm], f"algorithm.algorithm_type {algorithm}")
    if (mode := out.file.get("mode")) != "train":
        out.problems.append(f"mode {mode} with {algorithm} is refused by Trinity too; write train")
    _translate_rows(out, algorithm)
    _translate_batch(out, algorithm)
    if out.file.get("model.max_model_len") is not None:
        out.copy("dataset.most_tokens", "model.max_model_len", int, "; longer are refused")
    if algorithm == "dpo":
        _translate_preference(out)
    elif any(key.startswith("algorithm.kl_loss_fn") for key in out.file.given):
        out.left_out["algorithm.kl_loss_fn"] = "penalizes KL, which the loss of texts has none of"


def _translate_rows(out: Translation, algorithm: str) -> None:
    file, flow = out.file, GIVEN_FLOWS[algorithm]
    out.give_path(BUFFER)
    if (split := file.get(f"{BUFFER}.split")) != "train":
        out.refuse(f"{BUFFER}.split {split}: the rows of split train are trained", "dataset.path")
    form = str(file.get(f"{FORMAT}.prompt_type"))
    if (flow, form) not in COLUMNS:
        out.refuse(f"{FORMAT}.prompt_type {form} has no counterpart", "dataset.columns")
        return
    named = CPT if algorithm == "cpt" and form == "plaintext" else COLUMNS[flow, form]
    theirs = {ours: str(file.get(f"{FORMAT}.{key}")) for ours, key in named.items()}
    if renamed := {ours: name for ours, name in theirs.items() if ours != name}:
        keys = ", ".join(named[ours] for ours in renamed)
        out.give("dataset.columns", renamed, f"{FORMAT}: {keys}, or their defaults")
    for key in ("system_prompt", "system_prompt_key"):
        if form == "plaintext" and file.get(f"{FORMAT}.{key}") is not None:
            said = f"{FORMAT}.{key} puts a system message before each prompt"
            out.refuse(f"{said}; write it into the prompts, as lists of messages", "dataset.path")
    if (template := file.get(f"{FORMAT}.chat_template")) is not None:
        out.give("model.renderer", f"jinja:{template}", f"{FORMAT}.chat_template")
    if file.get(f"{FORMAT}.enable_thinking") is not None:
        out.copy("model.thinking", f"{FORMAT}.enable_thinking")
    if flow == "finetune" and form == "messages":
        whole = file.get(f"{FORMAT}.enable_concatenated_multi_turn")
        trained = "all" if algorithm == "cpt" else "assistant" if whole else "last_message"
        reason = file.reason(f"{FORMAT}.enable_concatenated_multi_turn")
        out.give("dataset.trained", trained, "cpt" if algorithm == "cpt" else reason)


def _translate_batch(out: Translation, algorithm: str) -> None:
    size = "batch.pairs" if algorithm == "dpo" else "batch.examples"
    rows = int(out.file.number("buffer.train_batch_size"))
    if rows:
        out.give(size, rows, "buffer.train_batch_size")
    else:
        out.refuse("buffer.train_batch_size is missing, and no rollouts say how many rows", size)
    if algorithm == "dpo":
        return
    mode, reason = str(out.file.get("algorithm.loss_agg_mode")), "algorithm.loss_agg_mode"
    if mode == "seq-mean-token-sum":
        out.give("batch.normalisation", "fixed", f"{reason} {mode}")
        out.give("batch.divisor", float(rows), f"{reason} {mode}: the rows of a batch")
    elif mode in NORMALISATIONS:
        out.give("batch.normalisation", NORMALISATIONS[mode], out.file.reason(reason))
    else:
        out.refuse(f"{reason} {mode} has no counterpart", "batch.normalisation")


def _translate_preference(out: Translation) -> None:
    key = "algorithm.policy_loss_fn_args"
    given = dict(out.file.get(key) or {})
    given.pop("loss_agg_mode", None)  # Trinity overwrites it
    if strange := sorted(given.keys() - SETTINGS):
        out.refuse(f"{key} has {listed(strange)}, which dpo does not read")
    settings = {
        ours: float(given.get(theirs, default)) for theirs, (ours, default) in SETTINGS.items()
    }
    out.give("preference.loss", "dpo", "algorithm.algorithm_type dpo, of each pair by itself")
    out.give("preference.loss_settings", settings, f"{key}, or their defaults")
    out.left_out["algorithm.kl_loss_fn"] = (
        "adds a KL to the loss, k2 if the file is silent; dpo has its own distance from the "
        "reference, by beta"
    )
