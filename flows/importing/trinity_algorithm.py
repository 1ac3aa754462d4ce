"""The algorithm of a Trinity-RFT file: its functions and their arguments, as a recipe's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal, cast

from ratchet.adapters.errors import listed
from ratchet.flows.importing.trinity_file import MissingVariable, Translation, named_path
from ratchet.tasks.algorithm.advantages import find_advantage
from ratchet.tasks.algorithm.divergences import LOSS_ESTIMATORS
from ratchet.tasks.algorithm.losses import advantage_factor, find_loss
from ratchet.tasks.algorithm.settings import Settings, used_settings
from ratchet.tasks.settings.presets import KL
from ratchet.tasks.storage.dotted_keys import Json, Section

Setting = tuple[str, Callable[[Any], float | str]]


@dataclass(frozen=True)
class Function:
    """A function of Trinity, by the row of our table that computes the same.

    `arguments` map to settings of the row. `required` arguments must have one of the given values,
    and `ignored` ones change nothing here. `defaults` are Trinity's, where our row's differ.
    `constants` are settings of our row, and `remark` says what differs.
    """

    row: str
    arguments: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    required: Mapping[str, tuple[Json, ...]] = field(default_factory=dict[str, tuple[Json, ...]])
    ignored: tuple[str, ...] = ("epsilon",)
    defaults: Section = field(default_factory=dict[str, Json])
    constants: Settings = field(default_factory=dict[str, float | str])
    remark: str = ""


def _below(value: Any) -> float:
    return round(1 - float(value), 12)


def _above(value: Any) -> float:
    return round(1 + float(value), 12)


def _named(**names: str) -> Callable[[Any], Any]:
    return lambda value: names.get(str(value).replace("-", "_"), value)


CLIPS: Mapping[str, Setting] = {
    "clip_range_low": ("clip_low_threshold", _below),
    "clip_range_high": ("clip_high_threshold", _above),
}
OFF = (None, False)

ALGORITHMS: Mapping[str, tuple[str, str, str]] = {
    "grpo": ("grpo", "ppo", "k2"),
    "grpo_verl": ("grpo", "ppo", "k2"),
    "dapo": ("grpo", "ppo", "none"),
    "reinforceplusplus": ("reinforceplusplus", "ppo", "k2"),
    "rloo": ("rloo", "ppo", "k2"),
    "opmd": ("opmd", "opmd", "k2"),
    "asymre": ("asymre", "opmd", "none"),
    "topr": ("reinforce", "topr", "k2"),
    "cispo": ("grpo", "cispo", "k2"),
    "gspo": ("grpo", "gspo", "k2"),
    "sapo": ("grpo", "sapo", "k2"),
    "sppo": ("opmd", "sppo", "none"),
    "rec": ("rec", "rec", "k2"),
    "raft": ("raft", "sft", "none"),
    "multi_step_grpo": ("step_wise_grpo", "ppo", "k2"),
    "gigpo": ("gigpo", "ppo", "k2"),
    "mix": ("grpo", "mix", "k2"),
    "mix_chord": ("grpo", "mix_chord", "k2"),
    "on_policy_distill": ("on_policy_distill", "ppo", "none"),
    "jsd": ("jsd", "ppo", "none"),
}
"""Algorithm of Trinity → its functions of the advantage, the loss and the KL in the loss."""

COMPARISONS = {
    "grpo": Function(
        "standardized",
        {"std_threshold": ("threshold", lambda value: value)},
        {"duplicate_experiences": OFF, "rank_penalty": OFF, "std_cal_level": ("group",)},
    ),
    "step_wise_grpo": Function(
        "step_grpo",
        {"enable_step_norm": ("spread", lambda divides: "divide" if divides else "copy")},
        {"std_cal_level": ("group",), "std_threshold": OFF},
    ),
    "gigpo": Function(
        "gigpo",
        {"omega": ("omega", float), "fnorm": ("deviation", _named(std="group"))},
        {"gamma": (1.0,)},
    ),
    "reinforceplusplus": Function("reinforce_plus_plus", {}, {"gamma": (1.0,)}),
    "reinforce": Function("none"),
    "raft": Function("none"),
    "rloo": Function("leave_one_out"),
    "opmd": Function(
        "opmd",
        {"opmd_baseline": ("baseline", _named(logavgexp="log_mean_exp")), "tau": ("tau", float)},
    ),
    "asymre": Function(
        "asymre", {"baseline_shift": ("shift", float)}, defaults={"baseline_shift": -0.1}
    ),
    "rec": Function("centred", {}, {"std_normalize": OFF, "drop": OFF}),
    "on_policy_distill": Function("zero", ignored=("kl_coef",)),
    "jsd": Function("zero", {}, {"temperature": (1.0,)}, ("kl_coef", "lambda_coef", "chunk_size")),
}
TEACHINGS = ("on_policy_distill", "jsd")
"""Advantages of Trinity that read a teacher's log-probabilities, and no reward."""
RAFT = "raft"
EVERY_ROLLOUT = "select rollout_id, role, 1.0 as reward from rewards"
TEACHERS = "explorer.auxiliary_models"
IN_TRAINER = {f"{name}_verl": COMPARISONS[name] for name in ("grpo", "opmd", "asymre")}
"""Advantages that Trinity computes in the trainer too."""
ADVANTAGES: Mapping[str, Function] = COMPARISONS | IN_TRAINER
PPO = Function(
    "dual_clip",
    CLIPS | {"clip_ratio_c": ("dual_clip", float)},
    {"enable_sequence_masking": OFF, "fallback_to_policy_gradient": OFF},
    ("delta_sequence_masking",),
    {"clip_range_low": 0.2, "clip_range_high": 0.2, "clip_ratio_c": 3.0},
    remark="a forward pass more than ppo, which has no bound where A < 0",
)
EXPERT_ARGUMENTS = (
    "mu",
    *(f"mu_{part}" for part in ("peak", "valley", "warmup_steps", "decay_steps")),
    *("enable_phi_function", "sft_loss_agg_mode", "grpo_loss_agg_mode", "train_batch_size_usual"),
    *("train_batch_size_expert", "use_dynamic_bsz", "ppo_mini_batch_size"),
    *("ppo_micro_batch_size_per_gpu", "ngpus_trainer"),
)
"""Arguments of the losses that train an expert's texts too, beside those of PPO."""
MIXED = replace(PPO, ignored=(*PPO.ignored, *EXPERT_ARGUMENTS))
LOSSES: Mapping[str, Function] = {
    "ppo": PPO,
    "mix": MIXED,
    "mix_chord": MIXED,
    "opmd": Function("opmd", {"tau": ("tau", float)}, defaults={"tau": 1.0}),
    "gspo": Function("gspo", CLIPS, defaults={"clip_range_low": 3e-4, "clip_range_high": 4e-4}),
    "topr": Function("topr", {}, {"advantage_threshold": (0,)}, constants={"ratio": "token"}),
    "cispo": Function(
        "cispo",
        CLIPS,
        {"enable_mask_clip": OFF},
        ("mask_clip_range_low", "mask_clip_range_high"),
        {"clip_range_low": 1.0, "clip_range_high": 0.28},
    ),
    "sapo": Function(
        "sapo",
        {"tau_pos": ("tau_positive", float), "tau_neg": ("tau_negative", float)},
        defaults={"tau_pos": 1.0, "tau_neg": 1.05},
        remark="with the gate's derivative, which Trinity leaves out",
    ),
    "sppo": Function("sppo", {"epsilon": ("epsilon", float)}, defaults={"epsilon": 0.3}),
    "rec": Function(
        "rec",
        {
            "clip_mode": ("clip", _named(one_side="one_side", two_side="two_side")),
            "epsilon_low": ("clip_low_threshold", _below),
            "epsilon_high": ("clip_high_threshold", _above),
            "epsilon_low_prime": ("ring_low_threshold", _below),
            "epsilon_high_prime": ("ring_high_threshold", _above),
            "weight": ("weight", _named(importance_sampling="ratio")),
            "temp": ("temperature", float),
            "regularizer": ("regularizer", _named(forward_kl="forward_kl")),
            "regularizer_coef": ("regularizer_coefficient", float),
        },
        ignored=(),
    ),
    "importance_sampling": Function("importance_sampling"),
    "sft": Function("cross_entropy"),
}
AS_K1 = ("k2", "corrected_k3")
"""KL functions of Trinity's loss that have, at ratio 1, the gradient of k1 in the advantage."""
LOSS_KEYS = ("loss", "loss_settings")
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "rollout_mean",
    "seq-mean-token-sum": "rollout_sum",
}


def translate_algorithm(out: Translation) -> None:
    """Translate the section `algorithm`, less the optimizer."""
    name = str(out.file.get("algorithm.algorithm_type")).lower()
    if name not in ALGORITHMS:
        said = f"algorithm.algorithm_type {name} has no counterpart"
        out.refuse(said, "algorithm.preset", "algorithm.advantage")
        return
    advantage, loss, kl = ALGORITHMS[name]
    _translate_function(out, "advantage", "algorithm.advantage_fn", advantage)
    _translate_function(out, "loss", "algorithm.policy_loss_fn", loss)
    _use_one_pass(out)
    _translate_aggregation(out)
    _translate_kl(out, kl)
    _translate_entropy(out)
    if name == RAFT:
        reason = "raft trains every rollout alike; add `where reward > …` to choose some"
        out.give("algorithm.rewards", EVERY_ROLLOUT, reason)
    _translate_teacher(out, str(out.file.get("algorithm.advantage_fn") or advantage))
    if name in EXPERTS:
        translate_expert(out, name)


def _translate_function(
    out: Translation, part: Literal["advantage", "loss"], key: str, default: str
) -> None:
    """Translate the function that a key of Trinity names, or the algorithm's default one."""
    table, find_row = (ADVANTAGES, find_advantage) if part == "advantage" else (LOSSES, find_loss)
    name = str(out.file.get(key) or default)
    if name not in table:
        out.refuse(f"{key} {name} has no counterpart", f"algorithm.{part}")
        return
    function, given = table[name], dict(out.file.get(f"{key}_args") or {})
    given.pop("loss_agg_mode", None)  # Trinity overwrites it
    if part == "loss" and (clip := given.pop("clip_range", None)) is not None:
        given = {"clip_range_low": clip, "clip_range_high": clip} | given
    known = {*function.arguments, *function.required, *function.ignored}
    if strange := sorted(given.keys() - known):
        out.refuse(f"{key}_args has {listed(strange)}, which {name} does not read")
    for argument, values in function.required.items():
        if given.get(argument, values[0]) not in values:
            said = f"{key}_args.{argument} {given[argument]!r} has no counterpart"
            out.refuse(said, f"algorithm.{part}")
    complete = dict(function.defaults) | given
    settings = {
        ours: read(complete[argument])
        for argument, (ours, read) in function.arguments.items()
        if complete.get(argument) is not None
    }
    settings |= function.constants
    reason = out.file.reason(key) if out.file.get(key) else f"the default of {name} in Trinity"
    out.give(f"algorithm.{part}", function.row, "; ".join(filter(None, [reason, function.remark])))
    if settings := used_settings(settings, find_row(function.row).settings):
        out.give(f"algorithm.{part}_settings", settings, f"{key}_args, or their defaults")


def _use_one_pass(out: Translation) -> None:
    """Take PPO's loss where the bound at a negative advantage cannot act, since the ratio is 1."""
    loss, lag = (out.value_of(key) for key in ("algorithm.loss", "rollouts.lag"))
    clips, reason = out.values.get("algorithm.loss_settings", (None, ""))
    if loss == "dual_clip" and str(lag) == "0" and isinstance(clips, Mapping):
        out.give("algorithm.loss", "ppo", "ratios are 1 without lag, so that no clip acts")
        kept = {key: value for key, value in clips.items() if key != "dual_clip"}
        out.give("algorithm.loss_settings", kept, reason)


def _translate_aggregation(out: Translation) -> None:
    own = (out.file.get("algorithm.policy_loss_fn_args") or {}).get("grpo_loss_agg_mode")
    mode = str(own or out.file.get("algorithm.loss_agg_mode"))
    if mode not in AGGREGATIONS:
        out.refuse(f"algorithm.loss_agg_mode {mode} has no counterpart", "algorithm.aggregation")
        return
    aggregation, reason = AGGREGATIONS[mode], out.file.reason("algorithm.loss_agg_mode")
    if aggregation == "token_mean" and out.file.get("model.tinker.enable"):
        aggregation = "rollout_mean"
        reason += ", which Trinity's Tinker trainer computes of each rollout"
    out.give("algorithm.aggregation", aggregation, reason)


def _translate_kl(out: Translation, default: str) -> None:
    in_loss, coefficient = _penalty(out, "algorithm.kl_loss_fn", default)
    in_reward, other = _penalty(out, "algorithm.kl_penalty_fn", "none")
    overriding = "algorithm.kl.coefficient"
    if coefficient and other:
        out.refuse("algorithm.kl_loss_fn and algorithm.kl_penalty_fn penalize KL twice", overriding)
        return
    if coefficient and in_loss not in AS_K1 and in_loss not in LOSS_ESTIMATORS:
        said = f"algorithm.kl_loss_fn {in_loss} has no gradient that keeps a policy near another"
        out.refuse(f"{said}; give k2", overriding)
        return
    if other and in_reward != "k1":
        said = f"algorithm.kl_penalty_fn {in_reward} in a reward has not the gradient of a KL"
        out.refuse(f"{said} divergence; give k1", overriding)
        return
    values: Section = {"coefficient": 0.0}
    reason = "algorithm.kl_loss_fn none" if in_loss == "none" else "algorithm.kl_loss_fn_args"
    if other:
        values = {"coefficient": other, "estimator": in_reward, "placement": "reward"}
        reason = "algorithm.kl_penalty_fn and its arguments"
    elif coefficient and in_loss in AS_K1 and _loss_factor(out) == 1:
        values = KL | {"coefficient": coefficient}
        reason = (
            f"algorithm.kl_loss_fn {in_loss}, whose gradient at ratio 1 is that of this penalty"
        )
    elif coefficient:
        estimator = in_loss if in_loss in LOSS_ESTIMATORS else "k2"
        values = {"coefficient": coefficient, "estimator": estimator, "placement": "loss"}
        reason = f"algorithm.kl_loss_fn {in_loss}, a term of its own"
    for key, value in values.items():
        out.give(f"algorithm.kl.{key}", value, reason)


def _loss_factor(out: Translation) -> float:
    """Return by what the loss multiplies an advantage at ratio 1; 1 for one that is refused."""
    name, given = (out.values.get(f"algorithm.{key}", ("", ""))[0] for key in LOSS_KEYS)
    settings = cast(Settings, given) if isinstance(given, Mapping) else {}
    try:
        return advantage_factor(str(name), settings)
    except ValueError:
        return 1.0


def _penalty(out: Translation, key: str, default: str) -> tuple[str, float]:
    """Return the estimator and the coefficient of one of Trinity's KL functions."""
    name = str(out.file.get(key) or default)
    if name == "none":
        return name, 0.0
    arguments = out.file.get(f"{key}_args") or {}
    if arguments.get("adaptive"):
        out.refuse(f"{key}_args.adaptive has no counterpart", "algorithm.kl.coefficient")
    return name, float(arguments.get("kl_coef", KL["coefficient"]))


def _translate_teacher(out: Translation, advantage: str) -> None:
    """Translate the teacher of a distillation, which is the first auxiliary model."""
    models = out.file.get(TEACHERS) or []
    if advantage not in TEACHINGS:
        if models:
            out.refuse(
                f"{TEACHERS} hosts further models on GPUs, for the workflow to call; give an agent "
                "that calls each as a role of the recipe, answered by a LiteLLM model",
                "agent",
                "roles",
            )
        return
    given, key = out.file.get("algorithm.advantage_fn_args") or {}, "algorithm.teacher"
    reason = "algorithm.advantage_fn_args, or their defaults"
    if len(models) == 1 and (model := models[0].get("model_path")):
        out.give(f"{key}.models", [model], f"{TEACHERS}[0].model_path")
    else:
        said = f"{TEACHERS} names {len(models)} teachers, not one"
        out.refuse(said, f"{key}.models", "algorithm.preset")
    out.give(f"{key}.coefficient", float(given.get("kl_coef", 1.0)), reason)
    beta = float(given.get("lambda_coef", 0.5))
    if advantage == "on_policy_distill" or beta == 0:
        out.give(f"{key}.divergence", "reverse_kl", f"algorithm.advantage_fn {advantage}")
    elif beta < 1:
        note = "with the sign that lessens the divergence, which in Trinity is the opposite"
        out.give(f"{key}.divergence", "jsd", f"algorithm.advantage_fn jsd; {note}")
        out.give(f"{key}.beta", beta, reason)
    else:
        out.refuse(
            f"algorithm.advantage_fn_args.lambda_coef {beta:g} is the forward KL, whose advantage "
            "has no bound",
            f"{key}.divergence",
            "algorithm.preset",
        )


def _translate_entropy(out: Translation) -> None:
    on = out.file.get("algorithm.entropy_loss_fn") != "none"
    arguments = out.file.get("algorithm.entropy_loss_fn_args") or {}
    coefficient = float(arguments.get("entropy_coef", 0.0)) if on else 0.0
    reason = out.file.reason("algorithm.entropy_loss_fn_args")
    if coefficient:
        reason += "; Trinity's Tinker trainer estimates the entropy by -p log p of sampled tokens"
    out.give("algorithm.entropy_coefficient", coefficient, reason)


EXPERTS = ("mix", "mix_chord")
"""Algorithms of Trinity that train an expert's texts beside rollouts."""
BUFFERS = "buffer.trainer_input.auxiliary_buffers"
SAMPLING = "algorithm.sample_strategy_args"


def expert_texts(out: Translation) -> int:
    """Return how many texts of an expert Trinity trains in each step: a share of its batch."""
    if str(out.file.get("algorithm.algorithm_type")).lower() not in EXPERTS:
        return 0
    rollouts = out.file.number("buffer.batch_size") * out.file.number("algorithm.repeat_times")
    trained = out.file.number("buffer.train_batch_size") or rollouts
    share = float((out.file.get(SAMPLING) or {}).get("expert_data_ratio", 0.5))
    return ceil(share * trained)


def translate_expert(out: Translation, name: str) -> None:
    """Translate the texts of an expert, which are an auxiliary buffer, and their loss."""
    given, key = out.file.get("algorithm.policy_loss_fn_args") or {}, "algorithm.expert"
    reason = "algorithm.policy_loss_fn_args, or their defaults"
    chord = name == "mix_chord"
    peak = float(given.get("mu_peak" if chord else "mu", 0.1))
    valley = float(given.get("mu_valley", 0.1)) if chord else peak
    warmup, decay = (
        int(given.get(f"mu_{part}_steps", 0)) if chord else 0 for part in ("warmup", "decay")
    )
    phi = chord and given.get("enable_phi_function", True)
    out.give(f"{key}.examples", expert_texts(out), f"{SAMPLING}.expert_data_ratio of the batch")
    out.give(f"{key}.loss", "phi" if phi else "cross_entropy", reason)
    mode = str(given.get("sft_loss_agg_mode") or out.file.get("algorithm.loss_agg_mode"))
    if mode != "token-mean":
        said = f"algorithm.policy_loss_fn_args.sft_loss_agg_mode {mode} has no counterpart"
        out.refuse(said, f"{key}.share", "algorithm.preset")
    if warmup and not decay and peak != valley:
        out.refuse(
            f"algorithm.policy_loss_fn_args falls from mu_peak {peak:g} to mu_valley {valley:g} at "
            "once, and a share of a recipe falls over steps",
            f"{key}.share",
            "algorithm.preset",
        )
    out.give(f"{key}.share", peak if decay or warmup else valley, reason)
    out.give(f"{key}.warmup_steps", warmup, reason)
    if decay:
        out.give(f"{key}.decay_steps", decay, reason)
        out.give(f"{key}.final_share", valley, reason)
    _translate_buffer(out, key)


def _translate_buffer(out: Translation, key: str) -> None:
    """Translate the auxiliary buffer that has the texts of an expert."""
    name = (out.file.get(SAMPLING) or {}).get("sft_dataset_name", "sft_dataset")
    buffers: Any = out.file.given.get(BUFFERS) or {}
    buffer = buffers.get(name) or {}
    layout = buffer.get("format") or {}
    try:
        path = out.file.resolve(f"{BUFFERS}.{name}.path", buffer.get("path"))
    except MissingVariable as missing:
        out.refuse(str(missing), f"{key}.path", "algorithm.preset")
        return
    if not path:
        out.refuse(f"{BUFFERS}.{name}.path is missing", f"{key}.path", "algorithm.preset")
        return
    column = layout.get("messages_key", "message")
    if layout.get("prompt_type", "messages") != "messages":
        out.refuse(
            f"{BUFFERS}.{name}.format.prompt_type {layout['prompt_type']} is of no expert's texts; "
            "write a file of rows with messages, or with prompt and completion "
            "(docs/methods.md)",
            f"{key}.path",
            "algorithm.preset",
        )
        return
    out.give(f"{key}.path", named_path(path), f"{BUFFERS}.{name}.path")
    if column != "messages":
        out.give(
            f"{key}.columns", {"messages": str(column)}, f"{BUFFERS}.{name}.format.messages_key"
        )
    trained = "assistant" if layout.get("enable_concatenated_multi_turn") else "last_message"
    out.give(f"{key}.trained", trained, f"{BUFFERS}.{name}.format.enable_concatenated_multi_turn")
