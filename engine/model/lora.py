"""LoRA configurations and weights: many sets of low-rank matrices over one frozen base model."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.attention import LayerGroup, LayerKind, LoraLinear
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.products import Pair

ALPHA = 32.0
"""Tinker's value: the update is scaled by 32 / rank, so one learning rate suits every rank."""


@dataclass(frozen=True)
class LoraConfig:
    """Rank and trained layers of a LoRA, as in Tinker's `lora_config`.

    Without a seed, the initial weights are drawn from a random seed.
    """

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RequestRefused(
                f"a LoRA of rank {self.rank} has no weights; the rank is 1 or more"
            )
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise RequestRefused(
                "this LoRA trains nothing; switch on train_attn, train_mlp or train_unembed"
            )

    @property
    def scale(self) -> float:
        return ALPHA / self.rank

    def trains(self, kind: LayerKind) -> bool:
        switches = {
            "attention": self.train_attn,
            "mlp": self.train_mlp,
            "unembedding": self.train_unembed,
        }
        return switches[kind]


class LoraWeights:
    """One set of low-rank weights: float32 tensors named `<layer>.lora_A` and `<layer>.lora_B`.

    A has the shape [rank, in], B has the shape [out, rank].
    """

    def __init__(self, config: LoraConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.tensors = tensors

    @classmethod
    def initial(cls, model: LanguageModel, config: LoraConfig) -> "LoraWeights":
        """Draw A uniformly from ±1/√in by the seed and set B to zero.

        With B zero, the model computes exactly what the base model computes.
        """
        seed = secrets.randbits(63) if config.seed is None else config.seed
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
        cls, model: LanguageModel, config: LoraConfig, tensors: Mapping[str, torch.Tensor]
    ) -> "LoraWeights":
        """Copy the tensors; raise RequestRefused unless they fit model and config exactly."""
        expected = expected_shapes(model, config)
        check_shapes(tensors, expected, what=f"LoRA weights for {model.name}")
        copies = {
            name: tensors[name].detach().to(model.device, torch.float32, copy=True)
            for name in expected
        }
        return cls(config, copies)

    def frozen(self) -> "LoraWeights":
        """Return a copy that later training does not change."""
        return LoraWeights(
            self.config, {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        )

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def pairs(self) -> dict[str, Pair]:
        """Layer name → (A, B)."""
        layers = [name.removesuffix(".lora_A") for name in self.tensors if name.endswith("_A")]
        return {
            layer: (self.tensors[f"{layer}.lora_A"], self.tensors[f"{layer}.lora_B"])
            for layer in layers
        }

    @torch.no_grad()
    def merged(self, model: LanguageModel) -> dict[str, torch.Tensor]:
        """Return name of a group → Wᵀ + scale · AᵀBᵀ, as large as the group's weight itself."""
        return {
            group.name: torch.cat([self._merge(layer) for layer in group.layers], 1)
            for group in self._groups(model)
        }

    @torch.no_grad()
    def packed(self, model: LanguageModel) -> dict[str, Pair]:
        """Return name of a group → A and scale · B, as sampling multiplies by them.

        A [layers · rank, in] has the rows of all layers, and B [out, layers · rank] the layers' own
        on its diagonal, with zeros elsewhere.
        """
        pack = model.products.pack
        packed = {}
        for group in self._groups(model):
            pairs = [self._pair(layer) for layer in group.layers]
            a = torch.cat([a for a, _ in pairs])
            b = torch.block_diag(*(b * self.config.scale for _, b in pairs))
            packed[group.name] = (pack(a), pack(b))
        return packed

    def _groups(self, model: LanguageModel) -> list[LayerGroup]:
        return [
            group
            for group in model.groups
            if any(layer.name in self.pairs for layer in group.layers)
        ]

    def _merge(self, layer: LoraLinear) -> torch.Tensor:
        weight = layer.weight.detach().t()
        if layer.name not in self.pairs:
            return weight
        a, b = self.pairs[layer.name]
        return torch.addmm(weight, a.t(), b.t(), alpha=self.config.scale)

    def _pair(self, layer: LoraLinear) -> Pair:
        """Return a layer's A and B, which have no ranks where the LoRA leaves the layer alone."""
        outputs, inputs = layer.weight.shape
        nothing = (layer.weight.new_zeros(0, inputs), layer.weight.new_zeros(outputs, 0))
        return self.pairs.get(layer.name, nothing)


def expected_shapes(model: LanguageModel, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return tensor name → shape, in the order of the network's layers.

    Raise RequestRefused for a rank above the size of every layer.
    """
    largest = max(max(layer.weight.shape) for layer in model.linears.values())
    if config.rank > largest:
        raise RequestRefused(
            f"a LoRA of rank {config.rank} is larger than every layer of {model.name}; give a rank "
            f"of {largest} or less"
        )
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
    """Raise RequestRefused for the first tensor that is missing, unknown or of another shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise RequestRefused(f"{what}: the tensor {name} is missing")
        if tuple(tensors[name].shape) != tuple(shape):
            found = tuple(tensors[name].shape)
            raise RequestRefused(f"{what}: {name} has the shape {found}, expected {tuple(shape)}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise RequestRefused(
            f"{what}: unexpected tensor {unknown[0]}; are rank and layers the same?"
        )
