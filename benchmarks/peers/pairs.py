"""Which of our formulas is compared with which of a peer's, and why some of them differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.peers.inputs import DISCOUNT, RANK_PENALTY
from ratchet.tasks.algorithm.settings import Settings

Arguments = Mapping[str, float | str | bool]


@dataclass(frozen=True)
class Pair:
    """A row of ours and a function of a peer's, each with its settings.

    `differs` is what the peer computes otherwise; without it, the two agree.
    """

    ours: str
    theirs: str
    settings: Settings = field(default_factory=dict[str, float | str])
    arguments: Arguments = field(default_factory=dict[str, float | str | bool])
    differs: str = ""
    peer: str = "trinity"


@dataclass(frozen=True)
class AdvantagePair(Pair):
    """Advantages of the calls of `step`, a name of `draw_steps`."""

    step: str = "groups"


NO_DUAL_CLIP = {"clip_ratio_c": 1e9}
RING = {"clip_mode": "ring"}

LOSSES = (
    Pair("importance_sampling", "importance_sampling"),
    Pair("ppo", "ppo", arguments=NO_DUAL_CLIP),
    Pair(
        "ppo", "ppo", differs="bounds the loss by -3 A where A < 0, as `dual_clip` does, by default"
    ),
    Pair("dual_clip", "ppo"),
    Pair(
        "dual_clip",
        "ppo",
        {"clip_high_threshold": 1.28},
        {"clip_range_low": 0.2, "clip_range_high": 0.28},
    ),
    Pair("dft", "sft_is"),
    Pair("phi", "sft_phi"),
    Pair("cispo", "cispo", {"clip_high_threshold": 1.28}),
    Pair("gspo", "gspo"),
    Pair("cross_entropy", "opmd", arguments={"tau": 0.0}),
    Pair("opmd", "opmd"),
    Pair("sapo", "sapo", differs="detaches the gate: -sg(f(ratio)) A log p, whose gradient is f A"),
    Pair("topr", "topr", differs="takes each token's ratio, the paper the trajectory's"),
    Pair("topr", "topr", {"ratio": "token"}),
    Pair("sppo", "sppo", differs="has the loss 0, not ∓A log(1 + ε), where the ratio is clipped"),
    Pair("rec", "rec"),
    Pair("rec", "rec", {"clip": "one_side"}, {"clip_mode": "one-side"}),
    Pair("rec", "rec", {"clip": "two_side"}, {"clip_mode": "two-side"}),
    Pair("rec", "rec", {"clip": "ring"}, RING),
    Pair(
        "rec", "rec", {"clip": "ring", "weight": "ratio"}, {**RING, "weight": "importance_sampling"}
    ),
    Pair(
        "rec",
        "rec",
        {"weight": "advantage", "temperature": 2.0},
        {"weight": "advantage", "temp": 2.0},
    ),
    Pair("rec", "rec", {"regularizer": "k2"}, {"regularizer": "k2", "regularizer_coef": 0.1}),
    Pair(
        "rec",
        "rec",
        {"regularizer": "forward_kl"},
        {"regularizer": "forward-kl", "regularizer_coef": 0.1},
    ),
)

EPSILON = "adds 1e-6 to the deviation"
EXACT = {"epsilon": 0.0}
RAW = "a rollout without others gets its reward, not 0"
TURNS = {"gamma": DISCOUNT, **EXACT}

ADVANTAGES = (
    AdvantagePair("centred", "compute_advantages", peer="cookbook"),
    AdvantagePair("centred", "compute_advantages", peer="cookbook", step="uniform"),
    AdvantagePair("centred", "compute_advantages", peer="cookbook", step="alone"),
    AdvantagePair("centred", "rec"),
    AdvantagePair("centred", "rec", step="alone", differs="fails on a rollout without others"),
    AdvantagePair("standardized", "grpo", differs=EPSILON),
    AdvantagePair(
        "standardized",
        "grpo",
        step="uniform",
        differs="rounds the mean of equal rewards, and divides the rest by 1e-6",
    ),
    AdvantagePair("standardized", "grpo", step="alone", differs=RAW),
    AdvantagePair("standardized", "grpo", arguments=EXACT),
    AdvantagePair("standardized", "grpo", {"threshold": 0.9}, {"std_threshold": 0.9, **EXACT}),
    AdvantagePair(
        "standardized",
        "grpo",
        arguments={"rank_penalty": RANK_PENALTY},
        step="ranked",
        differs="subtracts the mean of the penalized rewards from the raw reward",
    ),
    AdvantagePair(
        "standardized",
        "rec",
        arguments={"std_normalize": True},
        differs="divides by the biased deviation (n)",
    ),
    AdvantagePair("standardized_over_step", "grpo", arguments={"std_cal_level": "batch", **EXACT}),
    AdvantagePair("leave_one_out", "rloo"),
    AdvantagePair("leave_one_out", "rloo", step="alone", differs=RAW),
    AdvantagePair("none", "reinforce"),
    AdvantagePair("opmd", "opmd"),
    AdvantagePair(
        "opmd",
        "opmd",
        {"baseline": "log_mean_exp", "tau": 0.5},
        {"opmd_baseline": "logavgexp", "tau": 0.5},
    ),
    AdvantagePair("opmd", "opmd", step="alone", differs=RAW),
    AdvantagePair("asymre", "asymre"),
    AdvantagePair(
        "asymre",
        "asymre",
        step="alone",
        differs="a rollout without others gets its reward, not the shift",
    ),
    AdvantagePair("reinforce_plus_plus", "reinforceplusplus"),
    AdvantagePair("step_grpo", "step_wise_grpo", arguments=EXACT, step="turns"),
    AdvantagePair(
        "step_grpo",
        "step_wise_grpo",
        {"spread": "divide"},
        {"enable_step_norm": True, **EXACT},
        step="turns",
    ),
    AdvantagePair("gigpo", "gigpo", {"omega": 0.5}, {"omega": 0.5, **TURNS}, step="turns"),
    AdvantagePair(
        "gigpo",
        "gigpo",
        {"deviation": "group"},
        {**TURNS, "fnorm": "std"},
        step="turns",
    ),
    AdvantagePair(
        "gigpo",
        "gigpo",
        arguments=TURNS,
        step="shared",
        differs="compares calls of all tasks that observed the same, the paper those of one",
    ),
)

DIVERGENCES = (
    Pair("k1", "k1"),
    Pair("k2", "k2"),
    Pair("k3", "k3"),
    Pair("k3", "corrected_k3"),
    Pair("low_var_kl", "low_var_kl"),
    Pair("abs", "abs"),
    Pair(
        "k1",
        "incorporate_kl_penalty",
        {"coefficient": 0.1},
        {"kl_penalty_coef": 0.1, "kl_discount_factor": 0.0},
        peer="cookbook",
    ),
)
"""Estimates of the KL divergence; with settings, advantages that are lessened by it."""

PREFERENCES = (
    Pair("dpo", "compute_dpo_loss", arguments={"dpo_beta": 0.1}, peer="cookbook"),
    *(
        Pair(ours, theirs, settings, arguments, peer="trl")
        for ours, theirs, settings, arguments in (
            ("dpo", "sigmoid", {}, {}),
            ("dpo", "sigmoid", {"smoothing": 0.2}, {"label_smoothing": 0.2}),
            ("hinge", "hinge", {}, {}),
            ("ipo", "ipo", {}, {}),
            ("kto", "kto", {}, {}),
            (
                "kto",
                "kto",
                {"desirable_weight": 2.0, "undesirable_weight": 0.5},
                {"desirable_weight": 2.0, "undesirable_weight": 0.5},
            ),
            ("kto", "kto", {"desirable_weight": 2.0}, {"desirable_weight": 2.0, "labelled": True}),
            ("apo_zero", "apo_zero_unpaired", {}, {"labelled": True}),
            ("apo_zero", "apo_zero", {}, {}),
            ("apo_down", "apo_down", {}, {}),
            ("simpo", "simpo", {}, {"beta": 2.0}),
            ("cpo", "cpo", {}, {}),
            ("orpo", "orpo", {}, {}),
        )
    ),
)
"""Losses of pairs, or of `labelled` answers, which TRL calls by the names of its `loss_type`, or of
its trainers."""
