"""A LoRA as files: as the Tinker service gives it out, and in PEFT's form."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.adapters.errors import UserError

if TYPE_CHECKING:  # it takes seconds
    import torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX, SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
UNEMBEDDING = "model.unembed_tokens"
"""Name of the output layer in the service's files."""
OTHER_FORMS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Keys of PEFT's configuration by which the update is not alpha / rank · BA."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA: layer → A [rank, in] and B [out, rank], of which the layer adds alpha / rank · BA."""

    rank: int
    alpha: float
    layers: "Mapping[str, tuple[torch.Tensor, torch.Tensor]]"
    head: str
    """Name of the base's output layer, which may be one of the layers."""
    base: str = ""
    """The base that the files name, if they name one."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@contextmanager
def telling_of_full_disks() -> Iterator[None]:
    """Raise an OSError where safetensors finds no space, as everything else does."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if f"(os error {errno.ENOSPC})" not in str(error):
            raise
        raise OSError(errno.ENOSPC, str(error)) from error


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter in PEFT's form."""
    return (folder / CONFIG).is_file() and (folder / TENSORS).is_file()


def is_model(folder: Path) -> bool:
    """Return whether a folder has a model of its own, in Hugging Face's form."""
    return (folder / "config.json").is_file()


def read_base(folder: Path) -> str:
    """Return the base that an adapter names; UserError if it names none."""
    base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{folder / CONFIG} names no base_model_name_or_path; give it one")
    return str(base)


def read_adapter(folder: Path, head: str) -> Adapter:
    """Read an adapter of the service's or in PEFT's form; `head` names the base's output layer."""
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if other := [key for key in OTHER_FORMS if config.get(key)]:
        raise UserError(f"{folder} has {other[0]}, which is not read; give a plain LoRA")
    tensors = load_file(folder / TENSORS)
    layers = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]: name for name in tensors}
    for layer, name in layers.items():
        pair = [f"{PEFT_PREFIX}{layer}{suffix}" for suffix in SUFFIXES]
        if any(one not in tensors or tensors[one].dim() != 2 for one in pair):
            raise UserError(
                f"the tensor {name} in {folder} is not one of a pair lora_A and lora_B of two "
                "dimensions, as adapters of dense layers have them; export another base's run"
            )
    matrices = {
        head if layer == UNEMBEDDING else layer: (
            tensors[f"{PEFT_PREFIX}{layer}{SUFFIXES[0]}"].float(),
            tensors[f"{PEFT_PREFIX}{layer}{SUFFIXES[1]}"].float(),
        )
        for layer in layers
    }
    base = str(config.get("base_model_name_or_path") or "")
    return Adapter(int(config["r"]), float(config["lora_alpha"]), matrices, head, base)


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter in PEFT's form."""
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in adapter.layers}),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {
        f"{PEFT_PREFIX}{layer}{suffix}": matrix.contiguous()
        for layer, pair in adapter.layers.items()
        for suffix, matrix in zip(SUFFIXES, pair, strict=True)
    }
    with telling_of_full_disks():
        save_file(tensors, folder / TENSORS, {"format": "pt"})
