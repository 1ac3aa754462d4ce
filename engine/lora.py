"""Low-rank weights beside frozen linear layers, many sets of them over one base.

A linear layer computes x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ. Whose A and B it takes is decided by the
forward pass under way (`passes.py`), so one network serves every LoRA.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from engine.errors import UserError
from engine.passes import CURRENT
from engine.randomness import entropy

if TYPE_CHECKING:
    from engine.model import LanguageModel

ALPHA = 32.0
"""Tinker's: the update is scaled by 32 / rank, so one learning rate suits every rank."""

Kind = Literal["attention", "mlp", "unembedding"]


@dataclass(frozen=True)
class LoraConfig:
    """What a LoRA trains, as in Tinker's `lora_config`; without a seed one is drawn."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"a LoRA of rank {self.rank} has no weights; the rank is 1 or more")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise UserError(
                "this LoRA trains nothing; switch on train_attn, train_mlp or train_unembed"
            )

    @property
    def scale(self) -> float:
        return ALPHA / self.rank

    def trains(self, kind: Kind) -> bool:
        switches = {
            "attention": self.train_attn,
            "mlp": self.train_mlp,
            "unembedding": self.train_unembed,
        }
        return switches[kind]


class LoraLinear(nn.Module):
    """Stands in for an `nn.Linear` and shares its weight, tied or not."""

    def __init__(self, base: nn.Linear, name: str, kind: Kind) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.kind: Kind = kind

    @cached_property
    def transposed(self) -> torch.Tensor:
        """Wᵀ as a view, made once: making it anew at every call costs more than it seems."""
        return self.weight.detach().t()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        current = CURRENT.get()
        if current is None:
            return nn.functional.linear(inputs, self.weight, self.bias)
        return current.linear(self, inputs)


class Lora:
    """One set of low-rank weights: float32 tensors named `<layer>.lora_A` and `<layer>.lora_B`.

    A has the shape [rank, in], B has the shape [out, rank].
    """

    def __init__(self, config: LoraConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.tensors = tensors

    @classmethod
    def initial(cls, model: "LanguageModel", config: LoraConfig) -> "Lora":
        """A uniform in ±1/√in drawn from the seed, B zero: at first the base model itself."""
        seed = entropy() if config.seed is None else config.seed
        generator = torch.Generator().manual_seed(seed % 2**63)
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in expected_shapes(model, config).items():
            tensor = torch.zeros(shape)
            if name.endswith(".lora_A"):
                bound = 1 / math.sqrt(shape[1])
                tensor.uniform_(-bound, bound, generator=generator)
            tensors[name] = tensor.to(model.device)
        return cls(config, tensors)

    @classmethod
    def from_tensors(
        cls, model: "LanguageModel", config: LoraConfig, tensors: Mapping[str, torch.Tensor]
    ) -> "Lora":
        """Raises UserError where the tensors are not exactly those of this model and config."""
        expected = expected_shapes(model, config)
        check_shapes(tensors, expected, what=f"LoRA weights for {model.name}")
        return cls(
            config,
            {name: _own(tensors[name], model.device) for name in expected},
        )

    def frozen(self) -> "Lora":
        """A copy that later training does not touch."""
        return Lora(
            self.config, {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        )

    @cached_property
    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Layer → (A, B)."""
        layers = [name.removesuffix(".lora_A") for name in self.tensors if name.endswith("_A")]
        return {
            layer: (self.tensors[f"{layer}.lora_A"], self.tensors[f"{layer}.lora_B"])
            for layer in layers
        }

    @torch.no_grad()
    def merged(self, model: "LanguageModel") -> dict[str, torch.Tensor]:
        """Layer → Wᵀ + scale · AᵀBᵀ, as large as the layer itself."""
        return {
            name: torch.addmm(model.linears[name].transposed, a, b, alpha=self.config.scale)
            for name, (a, b) in self.transposed.items()
        }

    @cached_property
    def transposed(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Layer → (Aᵀ, Bᵀ), views for sampling."""
        return {layer: (a.detach().t(), b.detach().t()) for layer, (a, b) in self.pairs.items()}


def expected_shapes(model: "LanguageModel", config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Tensor name → shape, in the order of the network's layers."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, layer in model.linears.items():
        if config.trains(layer.kind):
            outputs, inputs = layer.weight.shape
            shapes[f"{name}.lora_A"] = (config.rank, inputs)
            shapes[f"{name}.lora_B"] = (outputs, config.rank)
    return shapes


def check_shapes(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raises UserError naming the first tensor that is missing, unknown or of another shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{what}: the tensor {name} is missing")
        if tuple(tensors[name].shape) != tuple(shape):
            found = tuple(tensors[name].shape)
            raise UserError(f"{what}: {name} has the shape {found}, expected {tuple(shape)}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise UserError(f"{what}: unexpected tensor {unknown[0]}; are rank and layers the same?")


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, torch.float32, copy=True)
