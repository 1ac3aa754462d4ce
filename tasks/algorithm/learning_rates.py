"""Default learning rates, by a rule of thumb for LoRA."""

from collections.abc import Mapping

FULL_TRAINING = 5e-5
"""Learning rate of full training at the hidden size CALIBRATED_WIDTH."""
LORA = 10.0
"""Factor between the learning rates of LoRA and of full training, whatever the LoRA's rank."""
CALIBRATED_WIDTH = 2000

LLAMA, QWEN = 0.781, 0.0775
"""Exponents of CALIBRATED_WIDTH / hidden size in the two families."""

CALIBRATED: Mapping[str, tuple[int, float]] = {
    "meta-llama/Llama-3.2-1B": (2048, LLAMA),
    "meta-llama/Llama-3.2-3B": (3072, LLAMA),
    "meta-llama/Llama-3.1-8B": (4096, LLAMA),
    "meta-llama/Llama-3.1-8B-Instruct": (4096, LLAMA),
    "meta-llama/Llama-3.1-70B": (8192, LLAMA),
    "meta-llama/Llama-3.3-70B-Instruct": (8192, LLAMA),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, QWEN),
    "Qwen/Qwen3-8B": (4096, QWEN),
    "Qwen/Qwen3-8B-Base": (4096, QWEN),
    "Qwen/Qwen3-30B-A3B": (2048, QWEN),
    "Qwen/Qwen3-30B-A3B-Base": (2048, QWEN),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (2048, QWEN),
    "Qwen/Qwen3-32B": (5120, QWEN),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (4096, QWEN),
}
"""Model of a Tinker service → its hidden size, and the exponent of its family."""


def default_learning_rate(base: str) -> float:
    """Return 5e-5 × 10 × (2000 / hidden size)^exponent; ValueError for any other base model.

    This rule of thumb for LoRA comes from Thinking Machines ("LoRA Without Regret",
    https://thinkingmachines.ai/blog/lora/), with the numbers of `get_lr` in the Tinker cookbook
    0.5.8. It was fitted to supervised training of Llama 3 and Qwen3, so a model of another family
    has no default. The rate has three significant digits, so that every machine computes the same
    recipe.
    """
    if base not in CALIBRATED:
        raise ValueError(
            f"there is no default learning rate for {base}, since the rule of thumb was calibrated "
            "on Llama 3 and Qwen3 alone (docs/algorithms.md); give optimizer.learning_rate"
        )
    hidden, exponent = CALIBRATED[base]
    return float(f"{FULL_TRAINING * LORA * (CALIBRATED_WIDTH / hidden) ** exponent:.3g}")
