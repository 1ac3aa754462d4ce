"""LoRA weights and optimizer state as safetensors files in a folder.

The weights are a PEFT adapter, so PEFT, vLLM and others load the folder as it is.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from durable.files import write_file
from engine.errors import RequestRefused
from engine.model.language_model import LanguageModel
from engine.model.lora import ALPHA, LoraConfig, LoraWeights

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
UNEMBEDDING = "model.unembed_tokens"
"""Name of the output layer in Tinker's exports."""

_PREFIX = "base_model.model."
_SUFFIX = ".weight"


def save_lora(lora: LoraWeights, folder: Path, renamed: Mapping[str, str] | None = None) -> None:
    """Write the weights; layers that are `renamed` have another name in the files."""
    names = {layer: (renamed or {}).get(layer, layer) for layer in lora.pairs}
    tensors = {
        f"{_PREFIX}{names[layer]}.{matrix}{_SUFFIX}": tensor
        for layer, pair in lora.pairs.items()
        for matrix, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    write_file(
        folder / CONFIG, json.dumps(_adapter_config(lora, names.values()), indent=2).encode()
    )
    write_file(folder / WEIGHTS, save(_portable(tensors)))


def save_external(lora: LoraWeights, model: LanguageModel, folder: Path) -> None:
    """Write the weights under the names that Tinker's exports have."""
    heads = (name for name, layer in model.linears.items() if layer.kind == "unembedding")
    save_lora(lora, folder, dict.fromkeys(heads, UNEMBEDDING))


def load_lora(model: LanguageModel, config: LoraConfig, folder: Path) -> LoraWeights:
    """Read weights; raise RequestRefused if they do not fit this model and config."""
    tensors = {
        name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor
        for name, tensor in _read(folder / WEIGHTS).items()
    }
    return LoraWeights.from_tensors(model, config, tensors)


def save_optimizer(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    write_file(folder / OPTIMIZER, save(_portable(tensors)))


def load_optimizer(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors for `Trainer.load_optimizer`, which checks names and shapes."""
    return _read(folder / OPTIMIZER)


def _adapter_config(lora: LoraWeights, layers: Iterable[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.config.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),
        "inference_mode": True,
    }


def _portable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.exists():
        raise RequestRefused(
            f"there is no {path.name} in {path.parent}; is it a checkpoint's folder?"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise RequestRefused(f"{path} is not a readable safetensors file: {error}") from error
