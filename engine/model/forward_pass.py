"""The interface between the network and the forward pass that runs through it.

The network is transformers' own and knows nothing of LoRAs, packing or caches. Its linear layers
and its attention functions ask the current pass (`CURRENT`), which is set around each call of the
network. Training and sampling implement `ForwardPass` in different ways.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

LayerKind = Literal["attention", "mlp", "unembedding"]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention inputs of one layer: tensors [tokens, heads, width], and the layer's settings."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None


class Attention(Protocol):
    """Attention over the sequences packed into one pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attended values [tokens, heads, width], in the order of the packed tokens."""
        ...


class LoraLinear(nn.Module):
    """Replacement of an `nn.Linear` that shares its weight, tied or not.

    A linear layer computes x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ. The current pass decides whose A and
    B are used, so one network serves every LoRA.
    """

    def __init__(self, base: nn.Linear, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.packed = base.weight.detach()
        """The weight as sampling multiplies by it: `Products.pack`."""
        self.name = name
        self.kind: LayerKind = kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return CURRENT.get().linear(self, inputs)


class ForwardPass(Protocol):
    """A forward pass, as linear layers and attention functions see it."""

    @property
    def attention(self) -> Attention: ...

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class BasePass:
    """A forward pass of the base model alone."""

    attention: Attention

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, layer.weight, layer.bias)


CURRENT: ContextVar[ForwardPass] = ContextVar("CURRENT")
"""The current pass of this thread."""
