"""LoRA weights and optimizer state ⇄ safetensors in a folder.

The weights are a PEFT adapter, so that PEFT, vLLM and others load the folder as it is. Each file
appears whole: written aside, flushed to the disk, renamed.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from engine.errors import UserError
from engine.lora import ALPHA, Lora, LoraConfig

if TYPE_CHECKING:
    from engine.model import LanguageModel

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"

_PREFIX = "base_model.model."
_SUFFIX = ".weight"


def save_lora(lora: Lora, folder: Path) -> None:
    """Write the weights as they are now."""
    tensors = {f"{_PREFIX}{name}{_SUFFIX}": tensor for name, tensor in lora.tensors.items()}
    _write(folder / CONFIG, json.dumps(_adapter_config(lora), indent=2).encode())
    _write(folder / WEIGHTS, save(_portable(tensors)))


def load_lora(model: "LanguageModel", config: LoraConfig, folder: Path) -> Lora:
    """Raises UserError where the folder's weights are not of this model and config."""
    tensors = {
        name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor
        for name, tensor in _read(folder / WEIGHTS).items()
    }
    return Lora.from_tensors(model, config, tensors)


def save_optimizer(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write what `Trainer.optimizer_tensors` gave."""
    _write(folder / OPTIMIZER, save(_portable(tensors)))


def load_optimizer(folder: Path) -> dict[str, torch.Tensor]:
    """What `Trainer.load_optimizer` takes; it checks names and shapes."""
    return _read(folder / OPTIMIZER)


def _adapter_config(lora: Lora) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.config.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(lora.pairs),
        "inference_mode": True,
    }


def _portable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.exists():
        raise UserError(f"there is no {path.name} in {path.parent}; is it a checkpoint's folder?")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error
