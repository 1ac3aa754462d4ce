"""The table of presets: algorithms by the field's names, each as explicit values of a recipe.

A preset is a row of PRESETS. It says nothing of sizes and learning rates, which depend on the model
and the task.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ratchet.tasks.algorithm.settings import find_row
from ratchet.tasks.settings.section import TABLES
from ratchet.tasks.storage.dotted_keys import Json, Section, find_value, flatten, merge_values

TRINITY = "Trinity-RFT 0.6.0"

PRESET_PARTS = ("advantage", "loss")
"""Keys of an algorithm whose settings are their own."""


@dataclass(frozen=True)
class Preset:
    """A row of the table.

    `algorithm` and `rollouts` are keys of a recipe, and `lacks` what of the algorithm has no key.
    """

    algorithm: Section
    source: str
    rollouts: Section = field(default_factory=dict[str, Json])
    lacks: str = ""

    @property
    def values(self) -> Mapping[str, Section]:
        """Keys of a recipe, by section."""
        sections = {"algorithm": self.algorithm, "rollouts": self.rollouts}
        return {section: keys for section, keys in sections.items() if keys}


def _advantage(name: str, **settings: Json) -> dict[str, Json]:
    return {"advantage": name, "advantage_settings": settings}


def _loss(name: str, **settings: Json) -> dict[str, Json]:
    return {"loss": name, "loss_settings": settings}


STANDARDIZED = _advantage("standardized", threshold=0.0)
CENTRED = _advantage("centred")
OPMD = _advantage("opmd", baseline="mean")
PPO = _loss("ppo", clip_low_threshold=0.8, clip_high_threshold=1.2)
TOKEN_MEAN: Section = {"aggregation": "token_mean"}
ROLLOUT_MEAN: Section = {"aggregation": "rollout_mean"}
KL = {"coefficient": 0.001, "estimator": "k1", "placement": "advantage"}
"""Gradient of Trinity-RFT's KL, k2 in the loss with 0.001, as long as the ratio is 1."""
ZERO = _advantage("zero") | _loss("importance_sampling")
PENALTY: Section = {"kl": KL}
PENALTY_IN_REWARD: Section = {"kl": KL | {"placement": "reward"}}
TEACHER_IS = "the teacher: give it as `algorithm.teacher.models`"
EXPERT_IS = "the expert's texts: give them as `algorithm.expert.path`"

GRPO = STANDARDIZED | PPO | ROLLOUT_MEAN | PENALTY

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(GRPO, "arXiv:2402.03300"),
    "grpo_verl": Preset(GRPO, "arXiv:2402.03300"),
    "dr_grpo": Preset(CENTRED | PPO | {"aggregation": "sum"}, "arXiv:2503.20783"),
    "dapo": Preset(
        STANDARDIZED | _loss("ppo", clip_low_threshold=0.8, clip_high_threshold=1.28) | TOKEN_MEAN,
        "arXiv:2503.14476",
        {"rounds": 10},
        "its penalty for long answers, which depends on the task: give it as `algorithm.rewards`",
    ),
    "rloo": Preset(
        _advantage("leave_one_out")
        | _loss("importance_sampling")
        | {"aggregation": "rollout_sum"}
        | PENALTY_IN_REWARD,
        "arXiv:2402.14740",
    ),
    "reinforceplusplus": Preset(
        _advantage("reinforce_plus_plus") | PPO | TOKEN_MEAN | PENALTY_IN_REWARD, "arXiv:2501.03262"
    ),
    "opmd": Preset(OPMD | _loss("opmd", tau=1.0) | TOKEN_MEAN | PENALTY, "arXiv:2505.17826"),
    "asymre": Preset(
        _advantage("asymre", shift=-0.1) | _loss("cross_entropy") | TOKEN_MEAN, "arXiv:2506.20520"
    ),
    "topr": Preset(
        _advantage("none") | _loss("topr", ratio="trajectory") | TOKEN_MEAN, "arXiv:2503.14286"
    ),
    "cispo": Preset(
        STANDARDIZED | _loss("cispo", clip_low_threshold=0.0, clip_high_threshold=4.0) | TOKEN_MEAN,
        "arXiv:2506.13585",
    ),
    "gspo": Preset(
        STANDARDIZED
        | _loss("gspo", clip_low_threshold=1 - 3e-4, clip_high_threshold=1 + 4e-4)
        | ROLLOUT_MEAN,
        "arXiv:2507.18071",
    ),
    "sapo": Preset(
        STANDARDIZED | _loss("sapo", tau_positive=1.0, tau_negative=1.05) | ROLLOUT_MEAN,
        "arXiv:2511.20347",
    ),
    "sppo": Preset(OPMD | _loss("sppo", epsilon=0.3) | TOKEN_MEAN, "arXiv:2108.05828"),
    "rec": Preset(
        CENTRED | _loss("rec", clip="none", weight="none", regularizer="none") | TOKEN_MEAN,
        "arXiv:2509.24203",
    ),
    "multi_step_grpo": Preset(
        _advantage("step_grpo", spread="copy") | PPO | TOKEN_MEAN | PENALTY, TRINITY
    ),
    "on_policy_distill": Preset(
        ZERO | {"teacher": {"coefficient": 1.0, "divergence": "reverse_kl"}},
        "https://thinkingmachines.ai/blog/on-policy-distillation",
        lacks=TEACHER_IS,
    ),
    "jsd": Preset(
        ZERO | {"teacher": {"coefficient": 1.0, "divergence": "jsd", "beta": 0.5}},
        "arXiv:2306.13649",
        lacks=TEACHER_IS,
    ),
    "mix": Preset(
        STANDARDIZED | PPO | TOKEN_MEAN | {"expert": {"loss": "cross_entropy", "share": 0.1}},
        TRINITY,
        lacks=EXPERT_IS,
    ),
    "mix_chord": Preset(
        STANDARDIZED | PPO | TOKEN_MEAN | {"expert": {"loss": "phi", "share": 0.1}},
        "arXiv:2508.11408",
        lacks=EXPERT_IS,
    ),
    "gigpo": Preset(
        _advantage("gigpo", omega=1.0, deviation="none") | PPO | TOKEN_MEAN | PENALTY,
        "arXiv:2505.10978",
    ),
}


def find_preset(name: str) -> Preset:
    """Return the row of a preset; ValueError if there is none."""
    return find_row("preset", name, PRESETS)


def expand_preset(given: Section) -> Section:
    """Lay the values of the recipe's preset, if it names one, under those that are given.

    The settings of an advantage or a loss that is not the preset's own are as they are given, and
    so is a KL penalty that is switched off.
    """
    algorithm = given.get("algorithm")
    name = algorithm.get("preset") if isinstance(algorithm, Mapping) else None
    if not isinstance(algorithm, Mapping) or not isinstance(name, str) or name not in PRESETS:
        return given
    preset = PRESETS[name].values
    own, chosen = preset["algorithm"], merge_values(preset["algorithm"], algorithm)
    for part in PRESET_PARTS:
        if chosen[part] != own[part]:
            chosen[f"{part}_settings"] = algorithm.get(f"{part}_settings", {})
    kl = algorithm.get("kl")
    if isinstance(kl, Mapping) and float(str(kl.get("coefficient", 1))) == 0:
        chosen["kl"] = kl  # the rest of the preset's penalty would do nothing
    return {**merge_values(preset, given), "algorithm": chosen}


def describe_preset(recipe: Section) -> str:
    """Describe in a line what a recipe's preset has become; empty without a preset."""
    name = find_value(recipe, "algorithm.preset") if "algorithm" in recipe else None
    if not isinstance(name, str):
        return ""
    row = PRESETS[name]
    own = {key: value for key, value in flatten(row.values, TABLES).items() if value != {}}
    said = [f"{key} {find_value(recipe, key)}" for key in own]
    changed = [key for key, value in own.items() if find_value(recipe, key) != value]
    instead = f" (given, not the preset's: {', '.join(changed)})" if changed else ""
    lacks = f"; without {row.lacks}" if row.lacks else ""
    return f"preset {name} ({row.source}): {', '.join(said)}{instead}{lacks}"
