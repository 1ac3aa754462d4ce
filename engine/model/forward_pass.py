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
        self.name = name
        self.kind: LayerKind = kind
        self.group: LayerGroup
        self.columns: slice
        """The layer's own outputs among those of its group, which sets both."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return CURRENT.get().linear(self, inputs)


class LayerGroup:
    """Linear layers that read one input, whose products sampling computes as one."""

    def __init__(self, layers: list[LoraLinear]) -> None:
        """Join the layers' weights [out, in], so that each has rows of one tensor."""
        self.layers = layers
        self.name = layers[0].name
        self.kind = layers[0].kind
        self.weight = layers[0].weight.detach()
        self.bias = layers[0].bias
        if len(layers) > 1:
            self.weight = torch.cat([layer.weight.detach() for layer in layers])
            self.bias = _join_biases(layers)
        self.packed = self.weight
        """The weight as sampling multiplies by it: `Products.pack`."""
        stop = 0
        for layer in layers:
            layer.group, layer.columns = self, slice(stop, stop + len(layer.weight))
            stop = layer.columns.stop
            if len(layers) > 1:
                layer.weight = nn.Parameter(self.weight[layer.columns], requires_grad=False)


def _join_biases(layers: list[LoraLinear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    device = layers[0].weight.device
    return torch.cat(
        [
            torch.zeros(len(one.weight), device=device) if one.bias is None else one.bias.detach()
            for one in layers
        ]
    )


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
